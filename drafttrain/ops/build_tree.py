"""Draft trees from their parents: depth and ancestors of the nodes, and a new tree of the best nodes of a tree of candidates,
as EAGLE-2 reranks (arXiv 2406.16858, section 4.2). And the generations by which such a tree of candidates grows.

Shapes: B rows, M candidates (root included), N nodes (root included, at most 256), w words of 64 nodes (`tree_bits`), H numbers
of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.ops import library
from drafttrain.ops import top as top_op
from drafttrain.ops.tree_bits import MOST_NODES, single_bits, words_for

MOST_CANDIDATES = 4096


def tree_links(parent_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(depth_BN, bits_BNw), int64, of trees by their parents: bit j of row i is set where j is i or an ancestor of i.

    parent[0] = -1, parent[i] < i, and padding has the root as its parent. The example in core/tree.py gives depth (0, 1, 1, 2)
    and bits (1, 3, 5, 11), each in the one word of its node. Raises ValueError for more than 256 nodes.
    """
    words = words_for(parent_BN.shape[1])
    if not _serves(parent_BN):
        return links_reference(parent_BN)
    depth_BN = torch.empty(parent_BN.shape, dtype=torch.long, device=parent_BN.device)
    bits_BNw = depth_BN.new_empty(*parent_BN.shape, words)
    torch.ops.drafttrain.tree_links(parent_BN.contiguous(), depth_BN, bits_BNw)
    return depth_BN, bits_BNw


def _serves(parent_BN: Tensor) -> bool:
    device_type = parent_BN.device.type
    return device_type in ("cpu", "cuda") and (library.state() if device_type == "cpu" else library.cuda_state()).loaded


def links_reference(parent_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Each pass doubles the distance that a node has looked up the tree. The root is its own ancestor, at distance 0."""
    (B, N), words = parent_BN.shape, words_for(parent_BN.shape[1])
    up_BN = parent_BN.clamp_min(0)
    bits_BNw = single_bits(0, N, words, parent_BN.device).expand(B, -1, -1)
    depth_BN = (torch.arange(N, device=parent_BN.device) > 0).long().expand_as(parent_BN)
    for _ in range(N.bit_length()):
        bits_BNw = bits_BNw | bits_BNw.gather(1, up_BN[..., None].expand(-1, -1, words))
        depth_BN = depth_BN + depth_BN.gather(1, up_BN)
        up_BN = up_BN.gather(1, up_BN)
    return depth_BN, bits_BNw


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

    EAGLE-2 reranks its drafts so (arXiv 2406.16858, section 4.2). Here M counts the candidates, root included.

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
        return build_reference(parent_BM, score_BM, nodes)
    kept_index, parent, depth, child, sibling = (parent_BM.new_empty(len(parent_BM), nodes) for _ in range(5))
    built = Built(kept_index, parent, depth, kept_index.new_empty(*kept_index.shape, words_for(nodes)), child, sibling)
    torch.ops.drafttrain.build_tree(
        parent_BM.contiguous(), score_BM.contiguous(), built.kept_BN, built.parent_BN, built.depth_BN, built.bits_BNw,
        built.child_BN, built.sibling_BN,
    )  # fmt: skip
    return built


def build_reference(parent_BM: Tensor, score_BM: Tensor, nodes: int) -> Built:
    """The plain-torch twin of `build_tree`."""
    rooted_BM = torch.cat([torch.full_like(score_BM[:, :1], torch.inf), score_BM[:, 1:]], 1)
    kept_BN = top_op.reference(rooted_BM, nodes)[1].sort(-1).values
    kept_parent_BN = parent_BM.gather(1, kept_BN)
    parent_BN = (kept_BN[:, None] <= kept_parent_BN[..., None]).sum(-1) - 1  # the parent's index among the kept candidates
    depth_BN, bits_BNw = links_reference(parent_BN)
    node_N = torch.arange(nodes, device=parent_BM.device)
    child_BNN = parent_BN[:, None] == node_N[:, None]
    sibling_BNN = (parent_BN[:, None] == parent_BN[..., None]) & (node_N > node_N[:, None])
    return Built(kept_BN, parent_BN, depth_BN, bits_BNw, _first(child_BNN), _first(sibling_BNN))


def _first(holds_BNN: Tensor) -> Tensor:
    """[B, N]: the first true column of each row, -1 without one."""
    return torch.where(holds_BNN.any(-1), holds_BNN.long().argmax(-1), -1)


@dataclass(frozen=True, slots=True)
class Grown:
    """The candidates below a generation of W nodes, and the W best of them, best first: the lower index among equals."""

    total_BC: Tensor  # float32: of each candidate's path
    token_BC: Tensor
    best_BW: Tensor  # indices of candidates
    score_BW: Tensor
    best_token_BW: Tensor
    state_BWH: Tensor  # of their parents
    bits_BWw: Tensor  # their own and those of their parents


def grow_tree(
    score_BW: Tensor, gain_BXR: Tensor, token_BXR: Tensor, state_BXH: Tensor, bits_BWw: Tensor, own_Ww: Tensor
) -> Grown:
    """The next generation of a tree that grows by confidence, as EAGLE-2 expands (arXiv 2406.16858, section 4.1).

    score, bits: of the nodes. gain: what each of their R choices adds to the score. own: the bit of each node to come. X is W,
    or 1 where the nodes share what it is of. C = W R.
    """
    if not (library.serves(gain_BXR) and score_BW.shape[1] <= top_op.MOST):
        return grow_reference(score_BW, gain_BXR, token_BXR, state_BXH, bits_BWw, own_Ww)
    (B, W), R, H = score_BW.shape, gain_BXR.shape[-1], state_BXH.shape[-1]
    total_BC, score = gain_BXR.new_empty(B, W * R), gain_BXR.new_empty(B, W)
    token_BC, (best, token) = token_BXR.new_empty(B, W * R), (token_BXR.new_empty(B, W) for _ in range(2))
    grown = Grown(total_BC, token_BC, best, score, token, state_BXH.new_empty(B, W, H), torch.empty_like(bits_BWw))
    given = (x.contiguous() for x in (score_BW, gain_BXR, token_BXR, state_BXH, bits_BWw, own_Ww))
    torch.ops.drafttrain.grow_tree(
        *given, grown.total_BC, grown.token_BC, grown.best_BW, grown.score_BW, grown.best_token_BW, grown.state_BWH,
        grown.bits_BWw,
    )  # fmt: skip
    return grown


def grow_reference(
    score_BW: Tensor, gain_BXR: Tensor, token_BXR: Tensor, state_BXH: Tensor, bits_BWw: Tensor, own_Ww: Tensor
) -> Grown:
    """The plain-torch twin of `grow_tree`."""
    (B, W), R = score_BW.shape, gain_BXR.shape[-1]
    total_BC, token_BC = (score_BW[..., None] + gain_BXR).flatten(1), token_BXR.expand(B, W, R).flatten(1)
    best_score_BW, best_BW = top_op.reference(total_BC, W)
    parent_BW1, expanded_BWH = (best_BW // R)[..., None], state_BXH.expand(B, W, state_BXH.shape[-1])
    state_BWH = expanded_BWH.gather(1, parent_BW1.expand_as(expanded_BWH))
    next_BWw = bits_BWw.gather(1, parent_BW1.expand_as(bits_BWw)) | own_Ww
    return Grown(total_BC, token_BC, best_BW, best_score_BW, token_BC.gather(1, best_BW), state_BWH, next_BWw)
