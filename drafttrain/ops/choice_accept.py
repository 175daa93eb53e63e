"""The accept walk where the target's choice after each node is given.

Shapes: B rows, N nodes (root included).
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.core.tree import DraftTree
from drafttrain.ops import library


def choice_accept(tree: DraftTree, choice_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(path_BN, count_B, bonus_B): the path from the root on which every token is the target's choice after its parent.

    path_BN: the accepted nodes in order, then zeros. Among children with the same token the first counts. bonus_B: the choice
    after the last accepted node.
    """
    if not library.serves(choice_BN.new_empty(0, dtype=torch.float32)):
        return reference(tree, choice_BN)
    verdict = blank(tree)
    torch.ops.drafttrain.choice_accept(choice_BN.contiguous(), *nodes(tree), *verdict)
    return verdict


def reference(tree: DraftTree, choice_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
