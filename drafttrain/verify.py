"""Floor 2: acceptance policies: which path of a verified tree becomes text, and the token that follows it.

Shapes: B rows, N nodes (root included), A accepted nodes (root included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from drafttrain.ops.greedy_accept import follow, greedy_accept
from drafttrain.sampling import Lane, Sampling, law, pick, uniform
from drafttrain.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """path_BA: accepted nodes, root first, padded with 0 past count_B. bonus_B: the target's token after the last one.

    `last_B` is the last accepted node.
    """

    path_BA: Tensor
    count_B: Tensor
    bonus_B: Tensor
    last_B: Tensor

    def trimmed(self) -> Verdict:
        """With no more columns than the longest path has nodes; asks the device how many."""
        return replace(self, path_BA=self.path_BA[:, : max(self.count_B.tolist())])


@dataclass(frozen=True, slots=True)
class Policy:
    """lossless: the output follows the target's own law (for greedy: is token-identical to plain greedy decoding)."""

    name: str
    lossless: bool
    verify: Callable[[DraftTree, Tensor, Tensor, Tensor, Sampling], Verdict]


def greedy(tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling) -> Verdict:
    """The deepest node whose every token is its parent's argmax."""
    return _along(*greedy_accept(tree, logits_BNV))


def coupled(tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling) -> Verdict:
    """The target chooses at every node with the noise of the next position, as plain sampling would; drafts that are the
    choice are accepted (after arXiv 2408.07978). The output is plain sampling's, token for token.
    """
    B, N = position_BN.shape
    keyed = sampling if sampling.key_B is None else sampling.rows(sampling.key_B.repeat_interleave(N))
    draw_M = uniform(keyed, (position_BN + 1).flatten(), Lane.TARGET)
    choice_BN = pick(law(logits_BNV, sampling).flatten(0, 1), draw_M).view(B, N)
    return _along(*follow(tree, choice_BN))


def lossless(tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling) -> Verdict:
    """Speculative sampling over a tree; the emitted tokens follow the target's processed law exactly.

    Where a node's children were sampled, child x is accepted with min(1, p(x) / q(x)) and a rejection leaves
    max(p - q, 0) (Leviathan et al., arXiv 2211.17192, section 2.3); for several children drawn without replacement
    q loses x and both are renormalised. Where they are deterministic, x is accepted with p(x) and a rejection
    removes x from p. Children are tried in index order; the last residual gives the bonus token.
    """
    B, N = tree.token_BN.shape
    row_B = torch.arange(B, device=logits_BNV.device)
    law_BNV = law(logits_BNV, sampling)
    real_BN = _real(tree)
    at_B = torch.zeros(B, dtype=torch.long, device=logits_BNV.device)
    p_BV = law_BNV[:, 0].clone()
    q_BV = None if tree.q_BNV is None else tree.q_BNV[:, 0].to(p_BV.dtype).clone()
    for i in range(1, N):
        tried_B = (tree.parent_BN[:, i] == at_B) & real_BN[:, i]
        if not bool(tried_B.any()):
            continue
        token_B = tree.token_BN[:, i]
        p_B, ratio_B = p_BV[row_B, token_B], p_BV[row_B, token_B]
        sampled_B = torch.zeros_like(tried_B) if tree.sampled_BN is None else tree.sampled_BN[row_B, at_B]
        if q_BV is not None:
            ratio_B = torch.where(sampled_B, p_B / q_BV[row_B, token_B].clamp_min(torch.finfo(p_B.dtype).tiny), p_B)
        draw_B = uniform(sampling, position_BN[:, i], Lane.ACCEPT, draw=i).to(p_BV.dtype)
        taken_B = tried_B & (draw_B < ratio_B)
        refused_B = tried_B & ~taken_B
        p_BV = torch.where(refused_B[:, None], _residual(p_BV, q_BV, token_B, sampled_B), p_BV)
        p_BV = torch.where(taken_B[:, None], law_BNV[:, i], p_BV)
        if q_BV is not None and tree.q_BNV is not None:
            q_BV = torch.where(refused_B[:, None], _without(q_BV, token_B), q_BV)
            q_BV = torch.where(taken_B[:, None], tree.q_BNV[:, i].to(q_BV.dtype), q_BV)
        at_B = torch.where(taken_B, i, at_B)
    draw_B = uniform(sampling, position_BN.gather(1, at_B[:, None])[:, 0] + 1, Lane.TARGET)
    return _verdict(ancestor_BNN, at_B, pick(p_BV, draw_B))


EPSILON, DELTA = 0.09, 0.3


def typical(tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling) -> Verdict:
    """Typical acceptance (arXiv 2401.10774, section 2.3.2): p(x) > min(eps, delta * exp(-H(p))). Not lossless."""
    law_BNV = law(logits_BNV, sampling)
    entropy_BN = -torch.xlogy(law_BNV, law_BNV).sum(-1)
    floor_BN = (DELTA * (-entropy_BN).exp()).clamp_max(EPSILON)
    return _likely(tree, ancestor_BNN, law_BNV, floor_BN, position_BN, sampling)


def threshold(
    tree: DraftTree,
    ancestor_BNN: Tensor,
    logits_BNV: Tensor,
    position_BN: Tensor,
    sampling: Sampling,
    least: float,
) -> Verdict:
    """A draft is accepted where the target gives it more than `least`. Not lossless."""
    law_BNV = law(logits_BNV, sampling)
    return _likely(tree, ancestor_BNN, law_BNV, torch.full_like(law_BNV[..., 0], least), position_BN, sampling)


def _likely(
    tree: DraftTree, ancestor_BNN: Tensor, law_BNV: Tensor, floor_BN: Tensor, position_BN: Tensor, sampling: Sampling
) -> Verdict:
    """The deepest path on which p(x) exceeds the parent's floor; ties in depth go to the path of higher likelihood.

    The bonus token is sampled from the target.
    """
    parent_BN = tree.parent_BN.clamp_min(0)
    p_BN = law_BNV.gather(1, parent_BN[..., None].expand(-1, -1, law_BNV.shape[-1])).gather(2, tree.token_BN[..., None])[..., 0]
    hit_BN = p_BN > floor_BN.gather(1, parent_BN)
    hit_BN[:, 0], p_BN[:, 0] = True, 1.0
    alive_BN = _whole_path(hit_BN & _real(tree), ancestor_BNN)
    likelihood_BN = (ancestor_BNN * p_BN.clamp_min(1e-30).log()[:, None]).sum(-1)
    score_BN = torch.where(alive_BN, ancestor_BNN.sum(-1) + likelihood_BN.exp().clamp_max(0.999), 0.0)
    last_B = score_BN.argmax(-1)
    row_B = torch.arange(len(last_B), device=last_B.device)
    draw_B = uniform(sampling, position_BN[row_B, last_B] + 1, Lane.TARGET)
    return _verdict(ancestor_BNN, last_B, pick(law_BNV[row_B, last_B], draw_B))


LEAST = 0.3  # of the threshold policy, unless set
POLICIES = {
    p.name: p
    for p in (
        Policy("greedy", True, greedy),
        Policy("lossless", True, lossless),
        Policy("coupled", True, coupled),
        Policy("typical", False, typical),
        Policy("threshold", False, partial(threshold, least=LEAST)),
    )
}


def policy_for(name: str, sampling: Sampling, least: float = LEAST) -> Policy:
    """The named policy; raises ValueError for an unknown name or one that contradicts the temperature.

    least: the probability that the threshold policy asks of a draft.
    """
    if name not in POLICIES:
        raise ValueError(f"decode.policy is {name!r}; choose one of {', '.join(POLICIES)}")
    if name == "greedy" and not sampling.greedy:
        raise ValueError(
            f"decode.policy=greedy at temperature {sampling.temperature}; set decode.policy=lossless, or temperature 0"
        )
    if name in ("typical", "threshold") and sampling.greedy:
        raise ValueError(f"decode.policy={name} at temperature 0; set decode.temperature above 0, or decode.policy=greedy")
    if name == "threshold":
        if not 0.0 < least < 1.0:
            raise ValueError(f"decode.threshold is {least}; set it above 0 and below 1")
        return replace(POLICIES[name], verify=partial(threshold, least=least))
    return POLICIES[name]


def _residual(p_BV: Tensor, q_BV: Tensor | None, token_B: Tensor, sampled_B: Tensor) -> Tensor:
    left_BV = p_BV.scatter(1, token_B[:, None], 0.0)
    if q_BV is not None:
        left_BV = torch.where(sampled_B[:, None], (p_BV - q_BV).clamp_min(0.0), left_BV)
    return left_BV / left_BV.sum(-1, keepdim=True).clamp_min(torch.finfo(p_BV.dtype).tiny)


def _without(q_BV: Tensor, token_B: Tensor) -> Tensor:
    left_BV = q_BV.scatter(1, token_B[:, None], 0.0)
    return left_BV / left_BV.sum(-1, keepdim=True).clamp_min(torch.finfo(q_BV.dtype).tiny)


def _real(tree: DraftTree) -> Tensor:
    return torch.arange(tree.token_BN.shape[1], device=tree.token_BN.device) < tree.count_B[:, None]


def _whole_path(hit_BN: Tensor, ancestor_BNN: Tensor) -> Tensor:
    """[B, N] bool: the node and all its ancestors are hits."""
    return ~(ancestor_BNN & ~hit_BN[:, None]).any(-1)


def _along(path_BN: Tensor, count_B: Tensor, bonus_B: Tensor) -> Verdict:
    path_BA = path_BN[:, : max(count_B.tolist())]
    return Verdict(path_BA, count_B, bonus_B, path_BA.gather(1, count_B[:, None] - 1)[:, 0])


def _verdict(ancestor_BNN: Tensor, last_B: Tensor, bonus_B: Tensor) -> Verdict:
    B, N, _ = ancestor_BNN.shape
    row_B = torch.arange(B, device=last_B.device)
    on_path_BN = ancestor_BNN[row_B, last_B]
    count_B = on_path_BN.sum(-1)
    node_N = torch.arange(N, device=last_B.device)
    path_BN = torch.where(on_path_BN, node_N, N).sort(-1).values[:, : int(count_B.max())]
    return Verdict(path_BN.masked_fill(path_BN == N, 0), count_B, bonus_B, last_B)
