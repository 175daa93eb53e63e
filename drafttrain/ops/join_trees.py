"""One draft tree with the token paths of two.

Shapes: B rows, N nodes of the first tree, M of the second, X = N + M - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.core.tree import DraftTree
from drafttrain.ops import library


def join_trees(first: DraftTree, second: DraftTree) -> DraftTree:
    """One tree with the token paths of both, each path once. The first tree's nodes come first, in their order.

    Both trees have the same roots, no siblings with the same token and no `q_BNV`. The result has a fixed shape of X nodes.
    The example of `core/tree.py` and r with a chain b d give r, a, b, c, d, where d's parent is b.
    """
    assert first.q_BNV is None and second.q_BNV is None, "the merged children are no sample of either distribution"
    token_BN = first.token_BN
    if token_BN.device.type != "cpu" or not library.serves_on(token_BN.device):
        return reference(first, second)
    shape = (len(token_BN), token_BN.shape[1] + second.token_BN.shape[1] - 1)
    ancestor_BXX = token_BN.new_empty((*shape, shape[1]), dtype=torch.bool)
    joined = DraftTree(
        token_BN.new_empty(shape), token_BN.new_empty(shape), token_BN.new_empty(shape[0]), known_BNN=ancestor_BXX
    )
    trees = [x for tree in (first, second) for x in (tree.token_BN, tree.parent_BN, tree.count_B.contiguous())]
    torch.ops.drafttrain.join_trees(*trees, joined.token_BN, joined.parent_BN, joined.count_B, ancestor_BXX)
    return joined


def reference(first: DraftTree, second: DraftTree) -> DraftTree:
    """The plain-torch twin of `join_trees`."""
    N, M = first.token_BN.shape[1], second.token_BN.shape[1]
    column = torch.arange(N + M, device=first.token_BN.device)
    real_BN, real_BM = column[:N] < first.count_B[:, None], column[:M] < second.count_B[:, None]
    shared_BMN = _same_paths(first, second, real_BM[:, :, None] & real_BN[:, None])
    shared_BM, index_BM = shared_BMN.long().max(-1)
    new_BM = real_BM & (shared_BM == 0)
    index_BM = torch.where(new_BM, first.count_B[:, None] + new_BM.cumsum(-1) - 1, index_BM)
    parent_BM = index_BM.gather(1, second.parent_BN.clamp_min(0))
    column_BM = torch.where(new_BM, index_BM, N + M - 1)  # the last one takes what is not new
    zeros_BM = torch.zeros_like(index_BM)
    token_BX = torch.cat([first.token_BN, zeros_BM], 1).scatter(1, column_BM, second.token_BN)[:, :-1]
    parent_BX = torch.cat([first.parent_BN, zeros_BM], 1).scatter(1, column_BM, parent_BM)[:, :-1]
    count_B = first.count_B + new_BM.sum(-1)
    parent_BX = torch.where(column[:-1] < count_B[:, None], parent_BX, 0)
    return DraftTree(token_BX, parent_BX, count_B)


def _same_paths(first: DraftTree, second: DraftTree, real_BMN: Tensor) -> Tensor:
    """[B, M, N] bool: whether node m of the second tree has the same token path as node n of the first.

    real_BMN: whether neither of the two is padding.
    """
    B, M, N = real_BMN.shape
    same_BMN = real_BMN & (second.token_BN[:, :, None] == first.token_BN[:, None])
    same_BMN[:, 0], same_BMN[:, :, 0] = False, False
    same_BMN[:, 0, 0] = True
    up_BM, up_BN = second.parent_BN.clamp_min(0), first.parent_BN.clamp_min(0)
    for _ in range(min(M, N).bit_length()):  # each pass doubles the length of the compared paths
        parents_match_BMN = same_BMN.gather(1, up_BM[..., None].expand(B, M, N)).gather(2, up_BN[:, None].expand(B, M, N))
        same_BMN = same_BMN & parents_match_BMN
        up_BM, up_BN = up_BM.gather(1, up_BM), up_BN.gather(1, up_BN)
    return same_BMN
