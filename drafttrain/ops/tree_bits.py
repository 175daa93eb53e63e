"""A tree's ancestors as bits, 64 nodes in each int64 word, and trees from their parents.

Shapes: B rows, N nodes (root included), M nodes of the whole tree, w words of a node, X bits of a word. Bit j % 64 of word j
// 64 is node j's; bit 63 is the sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.ops import library
from drafttrain.ops import top as top_op

MOST_NODES = 256  # of a tree, root included
WORD = 64  # bits of an int64


def words_for(nodes: int) -> int:
    """w: the words of a node in a tree of so many nodes. Raises ValueError for more than 256."""
    if nodes > MOST_NODES:
        raise ValueError(f"a tree of {nodes} nodes, root included; at most {MOST_NODES} are possible: propose fewer")
    return max(1, -(-nodes // WORD))


def bits_of(ancestor_BNM: Tensor) -> Tensor:
    """[B, N, w] int64 from [B, N, M] bool: bit j of row i is entry [i, j]. Raises ValueError for more than 256 nodes."""
    M = ancestor_BNM.shape[-1]
    w = words_for(M)
    if w == 1:
        return (ancestor_BNM.long() << torch.arange(M, device=ancestor_BNM.device)).sum(-1, keepdim=True)
    padded_BNwX = F.pad(ancestor_BNM, (0, w * WORD - M)).view(*ancestor_BNM.shape[:-1], w, WORD)
    return (padded_BNwX.long() << torch.arange(WORD, device=ancestor_BNM.device)).sum(-1)


def ancestors_of(bits_BNw: Tensor, nodes: int | None = None) -> Tensor:
    """[B, N, M] bool, the inverse of `bits_of`. nodes: M; None: N. Raises ValueError for more nodes than bits."""
    M, w = bits_BNw.shape[-2] if nodes is None else nodes, bits_BNw.shape[-1]
    if words_for(M) > w:
        raise ValueError(f"{M} nodes exceed the bits of {w} words of {WORD}")
    if w == 1:
        return (bits_BNw >> torch.arange(M, device=bits_BNw.device) & 1).bool()
    bit_BNwX = bits_BNw[..., None] >> torch.arange(WORD, device=bits_BNw.device) & 1
    return bit_BNwX.flatten(-2)[..., :M].bool()


def causal_bits(nodes: int, device: torch.device, earlier: int = 0) -> Tensor:
    """[N, w] int64, as `bits_of` for the last N nodes of a chain: each sees itself and all nodes before it."""
    w = words_for(earlier + nodes)
    last_N1 = torch.arange(earlier, earlier + nodes, device=device)[:, None]
    bit_index_Nw = last_N1 - torch.arange(w, device=device) * WORD  # the last bit that is set; below 0: none
    bits_Nw = (2 << bit_index_Nw.clamp(0, WORD - 1)) - 1  # 2 << 63 is 0, and 0 - 1 has all bits
    return bits_Nw if w == 1 else bits_Nw.where(bit_index_Nw >= 0, 0)


def single_bits(first: int, count: int, words: int, device: torch.device) -> Tensor:
    """[count, words] int64: row i has bit first + i alone."""
    node_N1 = torch.arange(first, first + count, device=device)[:, None]
    bits_Nw = torch.ones_like(node_N1) << node_N1 % WORD
    return bits_Nw.where(node_N1 // WORD == torch.arange(words, device=device), 0)


def words_of(bits: int, words: int) -> list[int]:
    """A number's lowest words, lowest first, as signed int64 numbers."""
    unsigned = [bits >> WORD * index & (1 << WORD) - 1 for index in range(words)]
    return [word - (1 << WORD) if word >> WORD - 1 else word for word in unsigned]


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
