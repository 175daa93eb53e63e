"""Keep the best nodes of a tree of candidates, as a new tree: EAGLE-2's reranking (arXiv 2406.16858, section 4.2).

Shapes: B rows, M candidates (root included), N nodes kept, w words of ancestor bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.ops import library
from drafttrain.ops import top as top_op
from drafttrain.ops import tree_links as links_op
from drafttrain.ops.tree_bits import MOST_NODES, words_for

MOST_CANDIDATES = 4096


@dataclass(frozen=True, slots=True)
class Built:
    """A tree of N nodes, as int64 tensors [B, N]; bits: [B, N, w]."""

    kept_BN: Tensor  # each node's candidate index, ascending
    parent_BN: Tensor
    depth_BN: Tensor  # as for `tree_links`
    bits_BNw: Tensor  # as for `tree_links`
    child_BN: Tensor  # each node's first child, -1 without one
    sibling_BN: Tensor  # the next child of the same parent, -1 without one


def build_tree(parent_BM: Tensor, score_BM: Tensor, nodes: int) -> Built:
    """Keep the root and the candidates with the highest scores, `nodes` in all, in the candidates' order.

    score_BM: float32 log-probabilities of the candidates' paths. No child's exceeds its parent's, so that the kept nodes form
    a tree. Among equal scores the lower index is kept; the root's score is not read. parent[0] = -1, parent[i] < i. Raises
    ValueError for more nodes than fit.

    Example: parents (-1, 0, 0, 1, 2), scores (0, -1, -2, -1.5, -9), 4 nodes: candidates 0, 1, 2, 3 are kept.
    """
    candidates = parent_BM.shape[1]
    if not 1 <= nodes <= min(candidates, MOST_NODES) or candidates > MOST_CANDIDATES:
        raise ValueError(
            f"{nodes} nodes of {candidates} candidates; a tree has 1 to {MOST_NODES} nodes, no more than there are "
            f"candidates, and those are at most {MOST_CANDIDATES}"
        )
    if not library.serves(score_BM):
        return reference(parent_BM, score_BM, nodes)
    kept_index, parent, depth, child, sibling = (parent_BM.new_empty(len(parent_BM), nodes) for _ in range(5))
    built = Built(kept_index, parent, depth, kept_index.new_empty(*kept_index.shape, words_for(nodes)), child, sibling)
    torch.ops.drafttrain.build_tree(
        parent_BM.contiguous(), score_BM.contiguous(), built.kept_BN, built.parent_BN, built.depth_BN, built.bits_BNw,
        built.child_BN, built.sibling_BN,
    )  # fmt: skip
    return built


def reference(parent_BM: Tensor, score_BM: Tensor, nodes: int) -> Built:
    """The plain-torch twin of `build_tree`."""
    rooted_BM = torch.cat([torch.full_like(score_BM[:, :1], torch.inf), score_BM[:, 1:]], 1)
    kept_BN = top_op.reference(rooted_BM, nodes)[1].sort(-1).values
    kept_parent_BN = parent_BM.gather(1, kept_BN)
    parent_BN = (kept_BN[:, None] <= kept_parent_BN[..., None]).sum(-1) - 1  # the parent's index among the kept candidates
    depth_BN, bits_BNw = links_op.reference(parent_BN)
    node_N = torch.arange(nodes, device=parent_BM.device)
    child_BNN = parent_BN[:, None] == node_N[:, None]
    sibling_BNN = (parent_BN[:, None] == parent_BN[..., None]) & (node_N > node_N[:, None])
    return Built(kept_BN, parent_BN, depth_BN, bits_BNw, _first(child_BNN), _first(sibling_BNN))


def _first(holds_BNN: Tensor) -> Tensor:
    """[B, N]: the first true column of each row, -1 without one."""
    return torch.where(holds_BNN.any(-1), holds_BNN.long().argmax(-1), -1)
