"""Attention of a chunk of a prompt: every new position sees its row's prefix, and the new positions up to itself.

No mask of all pairs is made, and the prefix is read where it is stored. Rows are computed one by one, since their lengths may
differ: a chunk has enough positions to fill an operator.

Shapes: B rows, N new positions, P prefix + new positions, g KV heads, r query heads of a KV head, h = g r, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from drafttrain.model.causal_attention import windowed
from drafttrain.model.kv_cache import KVCache


def chunk_attention(q_BNhD: Tensor, kv: KVCache, layer: int, scale: float | None = None, window: int | None = None) -> Tensor:
    """[B, N, h, D]: attention of N positions whose keys and values are written after each row's prefix.

    scale: of the scores; None: D ** -0.5. window: positions that a query sees at most, its own included; None: all.
    """
    rows = []
    for row, q_NhD in enumerate(q_BNhD):
        keys_gPD, values_gPD = kv.read_row(layer, row, len(q_NhD))
        rows.append(row_attention(q_NhD.transpose(0, 1), keys_gPD, values_gPD, scale, window).transpose(0, 1))
    return torch.stack(rows)


def row_attention(q_hND: Tensor, k_gPD: Tensor, v_gPD: Tensor, scale: float | None, window: int | None) -> Tensor:
    """[h, N, D]: the queries are the last N of P positions."""
    if window is not None and window < k_gPD.shape[1]:
        return windowed(q_hND[None], k_gPD[None], v_gPD[None], window, scale)[0]
    if q_hND.device.type == "cpu":
        return merged(q_hND, k_gPD, v_gPD, scale)
    return fused(q_hND[None], k_gPD[None], v_gPD[None], scale)[0]


def fused(q_BhND: Tensor, k_BgPD: Tensor, v_BgPD: Tensor, scale: float | None) -> Tensor:
    """[B, h, N, D] by torch's operators for a GPU, whose causal mask may begin after a prefix."""
    groups = q_BhND.shape[1] // k_BgPD.shape[1]
    if groups > 1 and q_BhND.dtype == torch.float32:  # flash does not take it, and the other kernel shares no keys
        k_BgPD, v_BgPD, groups = k_BgPD.repeat_interleave(groups, 1), v_BgPD.repeat_interleave(groups, 1), 1
    bias = causal_lower_right(q_BhND.shape[2], k_BgPD.shape[2])
    return F.scaled_dot_product_attention(q_BhND, k_BgPD, v_BgPD, bias, scale=scale, enable_gqa=groups > 1)


def merged(q_hND: Tensor, k_gPD: Tensor, v_gPD: Tensor, scale: float | None) -> Tensor:
    """[h, N, D] on a CPU, where torch's flash attention is causal only without a prefix.

    Attention to the prefix and attention among the new positions are computed apart, and weighted by their sums of
    exponentials (arXiv 2205.14135, section 3.1).
    """
    (h, N, D), (g, P, _) = q_hND.shape, k_gPD.shape
    q_grND = q_hND.view(g, h // g, N, D)
    new_k, new_v = (x_gPD[:, None, P - N :].expand(g, h // g, N, D) for x_gPD in (k_gPD, v_gPD))
    new_grND, new_lse_grN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_grND, new_k, new_v, 0.0, True, scale=scale
    )
    if P == N:
        return new_grND.reshape(h, N, D)
    # the queries of one KV head become rows of one attention, so that its keys are read once
    q_1gRD = q_grND.reshape(1, g, -1, D)
    prefix_1gRD, prefix_lse_1gR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_1gRD, k_gPD[None, :, : P - N], v_gPD[None, :, : P - N], scale=scale
    )
    share_grN1 = torch.sigmoid(prefix_lse_1gR.view(g, h // g, N) - new_lse_grN)[..., None].to(new_grND.dtype)
    return torch.lerp(new_grND, prefix_1gRD.view(g, h // g, N, D), share_grN1).reshape(h, N, D)
