"""Depth and ancestors of a draft tree's nodes, from their parents.

Shapes: B rows, N nodes (root included, at most 256), w words of 64 nodes (`tree_bits`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import library
from drafttrain.ops.tree_bits import single_bits, words_for


def tree_links(parent_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(depth_BN, bits_BNw), int64: bit j of row i is set where j is i or an ancestor of i.

    parent[0] = -1, parent[i] < i, and padding has the root as its parent. The example in core/tree.py gives depth (0, 1, 1, 2)
    and bits (1, 3, 5, 11), each in the one word of its node. Raises ValueError for more than 256 nodes.
    """
    words = words_for(parent_BN.shape[1])
    if not _serves(parent_BN):
        return reference(parent_BN)
    depth_BN = torch.empty(parent_BN.shape, dtype=torch.long, device=parent_BN.device)
    bits_BNw = depth_BN.new_empty(*parent_BN.shape, words)
    torch.ops.drafttrain.tree_links(parent_BN.contiguous(), depth_BN, bits_BNw)
    return depth_BN, bits_BNw


def _serves(parent_BN: Tensor) -> bool:
    device_type = parent_BN.device.type
    return device_type in ("cpu", "cuda") and (library.state() if device_type == "cpu" else library.cuda_state()).loaded


def reference(parent_BN: Tensor) -> tuple[Tensor, Tensor]:
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
