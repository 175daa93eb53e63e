"""The greedy accept walk over a verified tree.

Shapes: B rows, N nodes (root included), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import library
from drafttrain.tree import DraftTree


def greedy_accept(tree: DraftTree, logits_BNV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(path_BN, count_B, bonus_B): the path from the root on which every token is the target's choice after its parent.

    path_BN holds the accepted nodes in order, zeros behind them; of several children with one token the first counts.
    """
    if not (library.serves(logits_BNV) and logits_BNV.is_contiguous()):
        return reference(tree, logits_BNV)
    token_BN, parent_BN = tree.token_BN.contiguous(), tree.parent_BN.contiguous()
    path_BN, count_B, bonus_B = torch.empty_like(token_BN), torch.empty_like(tree.count_B), torch.empty_like(tree.count_B)
    torch.ops.drafttrain.greedy_accept(logits_BNV, token_BN, parent_BN, tree.count_B, path_BN, count_B, bonus_B)
    return path_BN, count_B, bonus_B


def reference(tree: DraftTree, logits_BNV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return follow(tree, logits_BNV.argmax(-1))


def follow(tree: DraftTree, choice_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The walk for any choice of the target after each node; the deepest node on a path of chosen tokens wins."""
    B, N = tree.token_BN.shape
    row_B, node_N = torch.arange(B, device=choice_BN.device), torch.arange(N, device=choice_BN.device)
    ancestor_BNN = tree.ancestor_BNN
    hit_BN = (tree.token_BN == choice_BN.gather(1, tree.parent_BN.clamp_min(0))) & (node_N < tree.count_B[:, None])
    hit_BN[:, 0] = True
    alive_BN = ~(ancestor_BNN & ~hit_BN[:, None]).any(-1)
    last_B = torch.where(alive_BN, ancestor_BNN.sum(-1), 0).argmax(-1)
    on_path_BN = ancestor_BNN[row_B, last_B]
    path_BN = torch.where(on_path_BN, node_N, N).sort(-1).values
    return path_BN.masked_fill(path_BN == N, 0), on_path_BN.sum(-1), choice_BN[row_B, last_B]
