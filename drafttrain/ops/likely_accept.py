"""Acceptance of drafts that are likely enough under the target: typical acceptance and a plain threshold. Not lossless.

Shapes: B rows, N nodes (root included), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.core.sampling import Lane, Sampling, distribution, pick, uniform
from drafttrain.core.tree import DraftTree
from drafttrain.ops import library
from drafttrain.ops.choice_accept import blank, nodes, path_to
from drafttrain.ops.shaped import shaped

ROUNDING = 1e-6  # paths whose log-likelihoods differ by less are equally likely


def likely_accept(
    tree: DraftTree, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling, epsilon: float, delta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(path_BN, count_B, bonus_B): the deepest path on which every p(x) exceeds min(epsilon, delta * exp(-H(p))).

    This is typical acceptance (arXiv 2401.10774, section 2.3.2); an infinite delta makes it a plain threshold of epsilon. p is
    the target distribution after the parent. Among paths of the same depth the likeliest wins, then the first. The bonus token
    is sampled.
    """
    if sampling.greedy or not library.serves(logits_BNV):
        return reference(tree, logits_BNV, position_BN, sampling, epsilon, delta)
    params, verdict = sampling.on_device(len(logits_BNV), logits_BNV.device), blank(tree)
    shaped_BNV = shaped(logits_BNV, sampling).contiguous()
    settings = (position_BN.contiguous(), params.temperature_M, params.key_M, params.seed_1, epsilon, delta)
    torch.ops.drafttrain.likely_accept(shaped_BNV, *nodes(tree), *settings, *verdict)
    return verdict


def reference(
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
