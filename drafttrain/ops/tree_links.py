"""Depth and ancestors of a draft tree's nodes, from their parents.

Shapes: B rows, N nodes (root included, at most 64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import library

MOST_NODES = 64  # bits of an int64


def tree_links(parent_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(depth_BN, bits_BN), int64: bit j of bits[b, i] is set where j is i or an ancestor of i; bit 63 is the sign.

    parent[0] = -1, parent[i] < i, and padding has the root as its parent. The example in core/tree.py gives depth (0, 1, 1, 2)
    and bits (1, 3, 5, 11). Raises ValueError for more than 64 nodes.
    """
    if parent_BN.shape[1] > MOST_NODES:
        raise ValueError(f"{parent_BN.shape[1]} nodes exceed the {MOST_NODES} bits of an integer; propose fewer")
    if not _serves(parent_BN):
        return reference(parent_BN)
    depth_BN, bits_BN = (torch.empty(parent_BN.shape, dtype=torch.long, device=parent_BN.device) for _ in range(2))
    torch.ops.drafttrain.tree_links(parent_BN.contiguous(), depth_BN, bits_BN)
    return depth_BN, bits_BN


def _serves(parent_BN: Tensor) -> bool:
    kind = parent_BN.device.type
    return kind in ("cpu", "cuda") and (library.state() if kind == "cpu" else library.cuda_state()).loaded


def reference(parent_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Each pass doubles the distance that a node has looked up the tree. The root is its own ancestor, at distance 0."""
    node_N = torch.arange(parent_BN.shape[1], device=parent_BN.device)
    up_BN = parent_BN.clamp_min(0)
    bits_BN = torch.ones_like(parent_BN) << node_N
    depth_BN = (node_N > 0).long().expand_as(parent_BN)
    for _ in range(len(node_N).bit_length()):
        bits_BN = bits_BN | bits_BN.gather(1, up_BN)
        depth_BN = depth_BN + depth_BN.gather(1, up_BN)
        up_BN = up_BN.gather(1, up_BN)
    return depth_BN, bits_BN
