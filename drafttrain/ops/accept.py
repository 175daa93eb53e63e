"""Which nodes of a verified draft tree are accepted: walks along given or most likely choices, speculative sampling, and
acceptance of what is likely enough.

Shapes: B rows, N nodes (root included), V vocabulary.

Speculative sampling (`lossless_accept`) emits tokens that follow the target distribution exactly. Where a node's children were
sampled, child x is accepted with probability min(1, p(x) / q(x)), and a rejection leaves max(p - q, 0) (Leviathan et al.,
arXiv 2211.17192, section 2.3). For several children sampled without replacement, x is then removed from q, and both are
renormalised. Where the children are deterministic, x is accepted with probability p(x), and a rejection removes x from p.
Children are tried in index order. The last residual gives the bonus token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.core.sampling import Lane, Sampling, distribution, pick, uniform
from drafttrain.core.tree import DraftTree
from drafttrain.ops import library
from drafttrain.ops.sampling import shaped

# Logits up to which a GPU reads all rows at once, which many processors share. Of more, one processor for each tree reads the
# rows that its walk enters. Calculated, not timed: 1,024 rows of 128k tokens take 60 µs to read, five rows of one tree 45.
EAGER = 1 << 27
ROUNDING = 1e-6  # paths whose log-likelihoods differ by less are equally likely


def choice_accept(tree: DraftTree, choice_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(path_BN, count_B, bonus_B): the path from the root on which every token is the target's choice after its parent.

    path_BN: the accepted nodes in order, then zeros. Among children with the same token the first counts. bonus_B: the choice
    after the last accepted node.
    """
    if not library.serves_on(choice_BN.device):
        return choice_reference(tree, choice_BN)
    verdict = blank(tree)
    torch.ops.drafttrain.choice_accept(choice_BN.contiguous(), *nodes(tree), *verdict)
    return verdict


def choice_reference(tree: DraftTree, choice_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The plain-torch twin of `choice_accept`."""
    B, N = tree.token_BN.shape
    row_B, node_N = torch.arange(B, device=choice_BN.device), torch.arange(N, device=choice_BN.device)
    hit_BN = (tree.token_BN == choice_BN.gather(1, tree.parent_BN.clamp_min(0))) & (node_N < tree.count_B[:, None])
    twin_BNN = (tree.parent_BN[..., None] == tree.parent_BN[:, None]) & hit_BN[:, None]
    hit_BN = hit_BN & ~twin_BNN.tril(-1).any(-1)
    hit_BN[:, 0] = True
    ancestor_BNN = tree.ancestor_BNN
    alive_BN = ~(ancestor_BNN & ~hit_BN[:, None]).any(-1)
    last_B = torch.where(alive_BN, ancestor_BNN.sum(-1), 0).argmax(-1)
    return *path_to(last_B, ancestor_BNN), choice_BN[row_B, last_B]


def nodes(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
    """(token_BN, parent_BN, count_B), contiguous for the compiled operators."""
    return tree.token_BN.contiguous(), tree.parent_BN.contiguous(), tree.count_B.contiguous()


def blank(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (path_BN, count_B, bonus_B) for the compiled operators to write."""
    B, N = tree.token_BN.shape
    return tree.token_BN.new_empty(B, N), tree.token_BN.new_empty(B), tree.token_BN.new_empty(B)


def path_to(last_B: Tensor, ancestor_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """(path_BN, count_B): the nodes from the root to the last, then zeros, and their number."""
    N = ancestor_BNN.shape[-1]
    on_path_BN = ancestor_BNN[torch.arange(len(last_B), device=last_B.device), last_B]
    path_BN = torch.where(on_path_BN, torch.arange(N, device=last_B.device), N).sort(-1).values
    return path_BN.masked_fill(path_BN == N, 0), on_path_BN.sum(-1)


def greedy_accept(tree: DraftTree, logits_BNV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(path_BN, count_B, bonus_B): the path from the root on which every token is the target's most likely one.

    path_BN: the accepted nodes in order, then zeros. Among children with the same token the first counts, among equally likely
    tokens the lowest. bonus_B: the most likely token after the last accepted node.
    """
    if not (library.serves(logits_BNV) and logits_BNV.is_contiguous()):
        return greedy_reference(tree, logits_BNV)
    verdict = blank(tree)
    torch.ops.drafttrain.greedy_accept(logits_BNV, *nodes(tree), *verdict)
    return verdict


def greedy_reference(tree: DraftTree, logits_BNV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The plain-torch twin of `greedy_accept`."""
    return choice_reference(tree, logits_BNV.argmax(-1))


def lossless_accept(
    tree: DraftTree, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """(path_BN, count_B, bonus_B): accepted nodes in order, then zeros; their number; the token after the last of them."""
    if sampling.greedy:  # p is a one-hot: the argmax is accepted, whatever q is
        return greedy_accept(tree, logits_BNV)
    if not library.serves(logits_BNV):
        return lossless_reference(tree, logits_BNV, position_BN, sampling)
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
        logits_BNV.numel() > EAGER,
        *verdict,
    )
    return verdict


def lossless_reference(
    tree: DraftTree, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
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


def likely_accept(
    tree: DraftTree, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling, epsilon: float, delta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(path_BN, count_B, bonus_B): the deepest path on which every p(x) exceeds min(epsilon, delta * exp(-H(p))).

    This is typical acceptance (arXiv 2401.10774, section 2.3.2); an infinite delta makes it a plain threshold of epsilon. p is
    the target distribution after the parent. Among paths of the same depth the likeliest wins, then the first. The bonus token
    is sampled.
    """
    if sampling.greedy or not library.serves(logits_BNV):
        return likely_reference(tree, logits_BNV, position_BN, sampling, epsilon, delta)
    params, verdict = sampling.on_device(len(logits_BNV), logits_BNV.device), blank(tree)
    shaped_BNV = shaped(logits_BNV, sampling).contiguous()
    settings = (position_BN.contiguous(), params.temperature_M, params.key_M, params.seed_1, epsilon, delta)
    torch.ops.drafttrain.likely_accept(shaped_BNV, *nodes(tree), *settings, *verdict)
    return verdict


def likely_reference(
    tree: DraftTree, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling, epsilon: float, delta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain-torch twin of `likely_accept`."""
    p_BNV, ancestor_BNN, parent_BN = distribution(logits_BNV, sampling), tree.ancestor_BNN, tree.parent_BN.clamp_min(0)
    B, N, V = p_BNV.shape
    entropy_BN = -torch.xlogy(p_BNV, p_BNV).sum(-1)
    threshold_BN = (delta * (-entropy_BN).exp()).clamp_max(epsilon)
    p_BN = p_BNV.gather(1, parent_BN[..., None].expand(-1, -1, V)).gather(2, tree.token_BN[..., None])[..., 0]
    hit_BN = (p_BN > threshold_BN.gather(1, parent_BN)) & (torch.arange(N, device=p_BN.device) < tree.count_B[:, None])
    hit_BN[:, 0], p_BN[:, 0] = True, 1.0
    alive_BN = ~(ancestor_BNN & ~hit_BN[:, None]).any(-1)
    depth_BN = torch.where(alive_BN, ancestor_BNN.sum(-1), 0)
    likelihood_BN = torch.where(ancestor_BNN, p_BN.log()[:, None], 0.0).sum(-1)
    likelihood_BN = likelihood_BN.masked_fill(depth_BN < depth_BN.amax(-1, keepdim=True), -torch.inf)
    best_BN = likelihood_BN >= likelihood_BN.amax(-1, keepdim=True) - ROUNDING
    last_B = best_BN.int().argmax(-1)
    row_B = torch.arange(B, device=last_B.device)
    draw_B = uniform(sampling, position_BN[row_B, last_B] + 1, Lane.TARGET)
    return *path_to(last_B, ancestor_BNN), pick(p_BNV[row_B, last_B], draw_B)
