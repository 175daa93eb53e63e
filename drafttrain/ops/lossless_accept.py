"""Speculative sampling over a verified tree: the emitted tokens follow the target distribution exactly.

Where a node's children were sampled, child x is accepted with probability min(1, p(x) / q(x)), and a rejection leaves max(p -
q, 0) (Leviathan et al., arXiv 2211.17192, section 2.3). For several children sampled without replacement, x is then removed
from q, and both are renormalised. Where the children are deterministic, x is accepted with probability p(x), and a rejection
removes x from p. Children are tried in index order. The last residual gives the bonus token.

Shapes: B rows, N nodes (root included), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.core.sampling import Lane, Sampling, distribution, pick, uniform
from drafttrain.core.tree import DraftTree
from drafttrain.ops import library
from drafttrain.ops.choice_accept import blank, nodes
from drafttrain.ops.greedy_accept import greedy_accept
from drafttrain.ops.shaped import shaped


def lossless_accept(
    tree: DraftTree, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """(path_BN, count_B, bonus_B): accepted nodes in order, then zeros; their number; the token after the last of them."""
    if sampling.greedy:  # p is a one-hot: the argmax is accepted, whatever q is
        return greedy_accept(tree, logits_BNV)
    if not library.serves(logits_BNV):
        return reference(tree, logits_BNV, position_BN, sampling)
    q_BNV = sampled_BN = None
    if tree.q_BNV is not None and tree.sampled_BN is not None:
        q_BNV, sampled_BN = tree.q_BNV.float().contiguous(), tree.sampled_BN.contiguous()
    params, verdict = sampling.on_device(len(logits_BNV), logits_BNV.device), blank(tree)
    shaped_BNV = shaped(logits_BNV, sampling).contiguous()
    torch.ops.drafttrain.lossless_accept(
        shaped_BNV,
        q_BNV,
        sampled_BN,
        *nodes(tree),
        position_BN.contiguous(),
        params.temperature_M,
        params.key_M,
        params.seed_1,
        *verdict,
    )
    return verdict


def reference(tree: DraftTree, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """The plain-torch twin of `lossless_accept`."""
    B, N = tree.token_BN.shape
    row_B, on_host = torch.arange(B, device=logits_BNV.device), logits_BNV.device.type == "cpu"
    p_BNV = distribution(logits_BNV, sampling)
    path_BN, count_B, node_B = torch.zeros_like(tree.token_BN), torch.ones_like(row_B), torch.zeros_like(row_B)
    p_BV = p_BNV[:, 0]
    q_BV = None if tree.q_BNV is None else tree.q_BNV[:, 0].to(p_BV.dtype)
    for i in range(1, N):
        tried_B = (tree.parent_BN[:, i] == node_B) & (i < tree.count_B)
        if on_host and not bool(tried_B.any()):  # on a GPU the sync would cost more than it saves
            continue
        token_B = tree.token_BN[:, i]
        ratio_B = p_B = p_BV[row_B, token_B]
        sampled_B = torch.zeros_like(tried_B) if tree.sampled_BN is None else tree.sampled_BN[row_B, node_B]
        if q_BV is not None:
            ratio_B = torch.where(sampled_B, p_B / q_BV[row_B, token_B].clamp_min(torch.finfo(p_B.dtype).tiny), p_B)
        accepted_B = tried_B & (uniform(sampling, position_BN[:, i], Lane.ACCEPT, draw=i) < ratio_B)
        rejected_B = tried_B & ~accepted_B
        p_BV = torch.where(rejected_B[:, None], _residual(p_BV, q_BV, token_B, sampled_B), p_BV)
        p_BV = torch.where(accepted_B[:, None], p_BNV[:, i], p_BV)
        if q_BV is not None and tree.q_BNV is not None:
            q_BV = torch.where(rejected_B[:, None], _normed(q_BV.scatter(1, token_B[:, None], 0.0)), q_BV)
            q_BV = torch.where(accepted_B[:, None], tree.q_BNV[:, i].to(q_BV.dtype), q_BV)
        node_B = torch.where(accepted_B, i, node_B)
        path_BN.scatter_(1, torch.where(accepted_B, count_B, 0)[:, None], torch.where(accepted_B, i, 0)[:, None])
        count_B = count_B + accepted_B
    draw_B = uniform(sampling, position_BN.gather(1, node_B[:, None])[:, 0] + 1, Lane.TARGET)
    return path_BN, count_B, pick(p_BV, draw_B)


def _residual(p_BV: Tensor, q_BV: Tensor | None, token_B: Tensor, sampled_B: Tensor) -> Tensor:
    """p after a rejection. It stays as it was where only rounding rejected a token that held all of p."""
    residual_BV = p_BV.scatter(1, token_B[:, None], 0.0)
    if q_BV is not None:
        residual_BV = torch.where(sampled_B[:, None], (p_BV - q_BV).clamp_min(0.0), residual_BV)
    return torch.where((residual_BV > 0).any(-1, keepdim=True), _normed(residual_BV), p_BV)


def _normed(residual_BV: Tensor) -> Tensor:
    return residual_BV / residual_BV.sum(-1, keepdim=True).clamp_min(torch.finfo(residual_BV.dtype).tiny)
