"""A tree's ancestors as bits, 64 nodes in each int64 word.

Shapes: B rows, N nodes (root included), M nodes of the whole tree, w words of a node, X bits of a word. Bit j % 64 of word j
// 64 is node j's; bit 63 is the sign.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

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
