"""Attention of a draft tree's nodes over the paged KV cache, which already holds the nodes' keys and values.

Shapes: B rows, N nodes, P positions (prefix, then nodes), Q pages, h query heads, k KV heads, g query heads per KV head, D
head width, V value width, w words of ancestor bits (`tree_bits`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import jit
from drafttrain.ops.kv_cache import flat
from drafttrain.ops.tree_bits import MOST_NODES, ancestors_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # keys and values of the kernel
WIDEST_SHARED, WIDEST_REST = 512, 64  # values that are a part of the keys, and the rest of these keys


def visible(length_B: Tensor, longest: int, ancestor_BNM: Tensor) -> Tensor:
    """[B, N, longest + M] bool: the positions that a node may attend to: its row's prefix, and its ancestors' positions.

    The nodes are the last N of a tree of M. With 5 positions in a row's cache (length 5, longest 5), node 3 of the example in
    core/tree.py sees positions 0 to 4, then 5 (node 0), 6 (node 1) and 8 (itself).
    """
    B, N, M = ancestor_BNM.shape
    position_P = torch.arange(longest + M, device=length_B.device)
    node_BP = position_P - length_B[:, None]
    scratch_BNP = ancestor_BNM.gather(2, node_BP.clamp(0, M - 1)[:, None].expand(B, N, -1))
    inside_BP = (node_BP >= 0) & (node_BP < M)
    return (node_BP < 0)[:, None] | (scratch_BNP & inside_BP[:, None])


def tree_attention(
    q_BNhD: Tensor, keys: Tensor, values: Tensor, table_BQ: Tensor, length_B: Tensor, bits_BNw: Tensor, position_BN: Tensor,
    scale: float, window: int | None, bound: int, earlier: int = 0, arrived: Tensor | None = None,
    cap: float | None = None, sinks_h: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[B, N, h V]: the tree's last N nodes attend to their row's prefix and to the nodes whose bits are set in bits_BNw.

    keys, values: contiguous [Q, page, k, D], or values that are the first V numbers of the keys, in their memory. Position p of
    row b is in page table_BQ[b, p // page]; node i of the tree is at position length_B[b] + i. A query in float32 stays exact
    where the keys are narrower, and the result is float32. earlier: nodes of the tree before these. window: keys are seen only
    within so many rotary positions; earlier nodes, whose rotary positions are not given, always are. position_BN: the nodes'
    rotary positions; those of the prefix are 0, 1, 2, ... bound: upper bound of every row's length + the tree. It alone decides
    the launch, so one CUDA graph works for all lengths up to it. A node that sees nothing gets zeros. At most 256 nodes in the
    tree. scale: above 0. arrived: int32 zeros on the device, which are zeros again afterwards: counters with which one launch
    does where few rows' keys are shared by several programs. Two calls must not have them at once, as on two streams. None: two
    launches. cap: a score becomes cap * tanh(score / cap). sinks_h: one more score per query head, whose share of the softmax
    adds nothing.
    """
    if not _serves(q_BNhD, keys, values):
        cache_args = (table_BQ, length_B, bits_BNw, position_BN)
        return reference(q_BNhD, keys, values, *cache_args, scale, window, bound, earlier, cap, sinks_h)
    from drafttrain.kernels.triton import tree_attention as kernels

    B, N, h, _ = q_BNhD.shape
    out_BNI = q_BNhD.new_empty(B, N, h * values.shape[3])
    for launch in kernels.launches(
        q_BNhD, keys, values, table_BQ, length_B, bits_BNw, position_BN, out_BNI, scale, window, bound, earlier, arrived, cap,
        sinks_h,
    ):  # fmt: skip
        launch.run()
    return out_BNI


def _serves(q_BNhD: Tensor, keys: Tensor, values: Tensor) -> bool:
    inference, (D, V) = not (torch.is_grad_enabled() and q_BNhD.requires_grad), (q_BNhD.shape[3], values.shape[3])
    supported_width = (
        D <= WIDEST if D == V else V <= WIDEST_SHARED and D - V <= WIDEST_REST and keys.data_ptr() == values.data_ptr()
    )
    supported_query = q_BNhD.shape[1] <= MOST_NODES and supported_width and q_BNhD.stride(3) == 1
    formats = keys.dtype in DTYPES and q_BNhD.dtype in (keys.dtype, torch.float32)
    return inference and supported_query and formats and jit.serves(q_BNhD)


def reference(
    q_BNhD: Tensor, keys: Tensor, values: Tensor, table_BQ: Tensor, length_B: Tensor, bits_BNw: Tensor, position_BN: Tensor,
    scale: float, window: int | None, bound: int, earlier: int = 0, cap: float | None = None, sinks_h: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The plain-torch twin of `tree_attention`."""
    B, N = q_BNhD.shape[:2]
    M = earlier + N
    kv_heads, device = keys.shape[2], q_BNhD.device
    position_BP = torch.arange(bound, device=device).repeat(B, 1)
    node_BN = length_B[:, None] + torch.arange(earlier, M, device=device)
    mask_BNP = visible(length_B, bound - M, ancestors_of(bits_BNw, M))
    if window is not None:
        rotary_BP = position_BP.scatter(1, node_BN, position_BN)  # an earlier node's place is no less than its rotary position
        mask_BNP = mask_BNP & (position_BN[..., None] - rotary_BP[:, None] < window)
    index_BP = flat(table_BQ, position_BP, keys.shape[1])
    valid_BP = position_BP < length_B[:, None] + M  # the other positions may hold anything, NaN too
    k_BPkD, v_BPkD = (
        pool.flatten(0, 1)[index_BP].float().masked_fill(~valid_BP[..., None, None], 0.0) for pool in (keys, values)
    )
    q_BNkgD = q_BNhD.float().reshape(B, N, kv_heads, -1, q_BNhD.shape[3])
    score_BkgNP = torch.einsum("bnkgd,bpkd->bkgnp", q_BNkgD, k_BPkD) * scale
    if cap is not None:
        score_BkgNP = torch.tanh(score_BkgNP / cap) * cap
    score_BkgNP = score_BkgNP.masked_fill(~mask_BNP[:, None, None], -torch.inf)
    if sinks_h is not None:
        sinks_BkgN1 = sinks_h.float().view(kv_heads, -1, 1, 1).expand(B, -1, -1, N, 1)
        score_BkgNP = torch.cat([score_BkgNP, sinks_BkgN1], -1)
    weight_BkgNP = score_BkgNP.softmax(-1)[..., :bound].masked_fill(~mask_BNP.any(-1)[:, None, None, :, None], 0.0)
    return torch.einsum("bkgnp,bpkd->bnkgd", weight_BkgNP, v_BPkD).flatten(2).to(q_BNhD.dtype)
