"""Causal attention over whole sequences within documents, of chunks of prompts, and with capped scores. No tensor is [T, T].

Of a chunk every new position sees its row's prefix, and the new positions up to itself. The prefix is read where it is stored.
Rows are computed one by one, since their lengths may differ: a chunk has enough positions to fill an operator.

Shapes: B rows, T positions, X = B T of all rows, E ends of documents, N new positions, R queries of a block, P keys that they
see, K keys of a part, h = g r heads, g KV heads, r query heads of a KV head, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents
from drafttrain.ops.later_steps import dot, wide

SCORES = 2**24  # in memory at once


def capped_attention(
    q_BhND: Tensor,
    k_BgPD: Tensor,
    v_BgPD: Tensor,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks_h: Tensor | None = None,
    mask_BNP: Tensor | None = None,
) -> Tensor:
    """[B, h, N, D]: scores are soft-capped (Gemma-2, arXiv 2408.00118, section 2) or share their softmax with sinks (gpt-oss).

    torch's fused attention has neither. The queries are taken in parts, so that memory never holds the scores of all pairs.
    Scores are float32. The values may have another width than the keys, as the result then has.

    mask_BNP: true where a query sees a key; None: the queries are the last N of P positions, causal within the window. cap:
    scores become cap * tanh(score / cap). sinks_h: one more score per head, whose share of the softmax goes nowhere.
    """
    (B, h, N, _), P = q_BhND.shape, k_BgPD.shape[2]
    rows = max(1, SCORES // max(1, B * h * P))
    if mask_BNP is None and window is not None:
        rows = min(rows, max(window, 64))  # so that most keys before the window are left out
    chunks = []
    for start in range(0, N, rows):
        stop = min(start + rows, N)
        first, last, chunk_mask = 0, P, None
        if mask_BNP is not None:
            chunk_mask = mask_BNP[:, start:stop]
        else:
            first, last = 0 if window is None else max(0, P - N + start + 1 - window), P - N + stop
            chunk_mask = _seen_keys(range(P - N + start, last), range(first, last), window, q_BhND.device)[None]
        keys_BgKD, values_BgKD = (x_BgPD[:, :, first:last] for x_BgPD in (k_BgPD, v_BgPD))
        chunks.append(_part(q_BhND[:, :, start:stop], keys_BgKD, values_BgKD, scale, cap, sinks_h, chunk_mask))
    return torch.cat(chunks, 2) if len(chunks) > 1 else chunks[0]


def _seen_keys(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """[N, P] bool by positions."""
    query_N1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key_P = torch.arange(keys.start, keys.stop, device=device)
    mask_NP = key_P <= query_N1
    return mask_NP if window is None else mask_NP & (query_N1 - key_P < window)


def _part(
    q_BhND: Tensor, k_BgPD: Tensor, v_BgPD: Tensor, scale: float, cap: float | None, sinks_h: Tensor | None, mask_BNP: Tensor
) -> Tensor:
    (B, h, N, D), g = q_BhND.shape, k_BgPD.shape[1]
    score_BgrNP = (q_BhND.reshape(B, g, -1, D) @ k_BgPD.transpose(-1, -2)).view(B, g, h // g, N, -1).float() * scale
    if cap is not None:
        score_BgrNP = torch.tanh(score_BgrNP / cap) * cap
    score_BgrNP = score_BgrNP.masked_fill(~mask_BNP[:, None, None], torch.finfo(torch.float32).min)
    if sinks_h is not None:
        sinks = sinks_h.float().view(1, g, h // g, 1, 1).expand(B, -1, -1, N, -1)
        score_BgrNP = torch.cat([score_BgrNP, sinks], -1)
    share_BgrNP = score_BgrNP.softmax(-1)[..., : k_BgPD.shape[2]].to(v_BgPD.dtype)
    return (share_BgrNP.reshape(B, g, -1, k_BgPD.shape[2]) @ v_BgPD).view(B, h, N, -1)


def with_sinks(out_BhTD: Tensor, lse_BhT: Tensor, sinks_hT: Tensor) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of attention whose softmax has one more score, which adds nothing. out, lse: of that without.

    sinks_hT: the score, of each query, or [h, 1] of each head. A backward pass that is given this output and log-sum-exp
    recomputes the whole softmax.
    """
    joint_BhT = torch.logaddexp(lse_BhT, wide(sinks_hT))
    return (out_BhTD * (lse_BhT - joint_BhT).exp()[..., None]).to(out_BhTD.dtype), joint_BhT


def sinks_gradient(grad_BhTD: Tensor, out_BhTD: Tensor, joint_BhT: Tensor, sinks_hT: Tensor) -> Tensor:
    """[h, T] the gradient of each query's sink. out, joint: as `with_sinks` gives them."""
    return -((wide(sinks_hT) - joint_BhT).exp() * dot(grad_BhTD, out_BhTD)).sum(0)


ROWS = 512  # queries of a block, with a sliding window


def causal(
    q_BhTD: Tensor,
    k_BgTD: Tensor,
    v_BgTD: Tensor,
    documents: Documents | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """[B, h, T, D] causal attention; for a process's columns of a sequence, those columns.

    documents: attention is computed for each document alone, without scores between two; None: every row is one document.
    window: positions that a query sees at most, its own included. scale: of the scores; None: D ** -0.5.
    """

    def one(q_BhTD: Tensor, k_BgTD: Tensor, v_BgTD: Tensor) -> Tensor:
        if window is not None and window < q_BhTD.shape[2]:
            return windowed(q_BhTD, k_BgTD, v_BgTD, window, scale)
        return _fused(q_BhTD, k_BgTD, v_BgTD, None, scale)

    def all_of_them(q_BhTD: Tensor, k_BgTD: Tensor, v_BgTD: Tensor) -> Tensor:
        if documents is not None and documents.several and _packs(q_BhTD):
            return packed(q_BhTD, k_BgTD, v_BgTD, documents, window, scale)
        return by_document(one, documents, q_BhTD, k_BgTD, v_BgTD)

    if documents is None or documents.span is None:
        return all_of_them(q_BhTD, k_BgTD, v_BgTD)
    span = documents.span
    return span.scatter(all_of_them(*(span.gather(x) for x in (q_BhTD, k_BgTD, v_BgTD))))


def by_document(function: Callable[..., Tensor], documents: Documents | None, *inputs: Tensor) -> Tensor:
    """[B, h, T, D]: the function's result over inputs [B, h, T, D], called for one document at a time."""
    if documents is None or not documents.several:
        return function(*inputs)
    rows = []
    for row, lengths in enumerate(documents.lengths):
        segments = zip(*(torch.split(x[row : row + 1], lengths, 2) for x in inputs), strict=True)
        rows.append(torch.cat([function(*segment) for segment in segments], 2))
    return torch.cat(rows)


def packed(
    q_BhTD: Tensor, k_BgTD: Tensor, v_BgTD: Tensor, documents: Documents, window: int | None, scale: float | None
) -> Tensor:
    """[B, h, T, D]: the documents of all rows in one call, by torch's attention of variable lengths."""
    from torch.nn.attention import varlen

    start_E, longest = documents.ends
    q_XhD, k_XgD, v_XgD = (x.transpose(1, 2).flatten(0, 1) for x in (q_BhTD, k_BgTD, v_BgTD))
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in signature(varlen.varlen_attn).parameters:
        options["enable_gqa"] = True
    elif (groups := q_XhD.shape[1] // k_XgD.shape[1]) > 1:  # torch 2.11
        k_XgD, v_XgD = k_XgD.repeat_interleave(groups, 1), v_XgD.repeat_interleave(groups, 1)
    out_XhD: Any = varlen.varlen_attn(q_XhD, k_XgD, v_XgD, start_E, start_E, longest, longest, **options)
    out_BhTD: Tensor = out_XhD.unflatten(0, (len(q_BhTD), -1)).transpose(1, 2)
    return out_BhTD


def _packs(q_BhTD: Tensor) -> bool:
    return q_BhTD.is_cuda and q_BhTD.dtype in (torch.bfloat16, torch.float16) and _packs_on(q_BhTD.device)


@cache
def _packs_on(device: torch.device) -> bool:
    """Whether `packed` gives the values and gradients of one call for each document on this GPU, tried once."""
    number_BT = torch.tensor([[0] * 5 + [1] * 70 + [2] * 53, [0] * 128])
    documents, generator = Documents(number_BT.to(device), host_BT=number_BT), torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, heads, 128, 64, generator=generator) for heads in (4, 2, 2)]
    outputs = []
    with torch.inference_mode(False), torch.enable_grad():
        try:
            for window in (None, 16):
                for attention in (packed, reference):
                    q, k, v = (x.to(device, torch.bfloat16).requires_grad_() for x in inputs)
                    out = attention(q, k, v, documents, window, None)
                    outputs.append([out, *torch.autograd.grad(out.float().square().sum(), [q, k, v])])
        except (RuntimeError, ImportError):
            return False
    pairs = [pair for index in (0, 2) for pair in zip(outputs[index], outputs[index + 1], strict=True)]
    return all(float((a - b).float().norm() / b.float().norm()) < 2e-2 for a, b in pairs)


def windowed(q_BhTD: Tensor, k_BgPD: Tensor, v_BgPD: Tensor, window: int, scale: float | None) -> Tensor:
    """[B, h, T, D] sliding-window attention, one block of queries at a time. The queries are the last T of P positions."""
    P, masks, outputs = k_BgPD.shape[2], dict[tuple[int, int], Tensor](), []
    prefix = P - q_BhTD.shape[2]
    for start in range(prefix, P, ROWS):
        stop, first = min(start + ROWS, P), max(0, start - window + 1)
        size = stop - start, stop - first
        if size not in masks:
            masks[size] = _seen(*size, window, q_BhTD.device)
        queries, keys = slice(start - prefix, stop - prefix), slice(first, stop)
        outputs.append(_fused(q_BhTD[:, :, queries], k_BgPD[:, :, keys], v_BgPD[:, :, keys], masks[size], scale))
    return torch.cat(outputs, 2)


def _fused(q_BhRD: Tensor, k_BgPD: Tensor, v_BgPD: Tensor, mask_RP: Tensor | None, scale: float | None) -> Tensor:
    """torch's attention: causal, or with the mask.

    On a GPU flash's and cuDNN's kernels share keys among heads and the memory-efficient kernel does not, so that keys are
    repeated for it; torch would otherwise compute all scores at once. By its sources torch tries cuDNN first on capability 9.0
    and 10.0 where cuDNN is newer than 9.15, and builds a plan for each new shape there; else, and with
    TORCH_CUDNN_SDPA_DEPRIORITIZED=1, it takes flash.
    """
    groups = q_BhRD.shape[1] // k_BgPD.shape[1]
    if q_BhRD.is_cuda and groups > 1 and (mask_RP is not None or q_BhRD.dtype == torch.float32):
        k_BgPD, v_BgPD, groups = k_BgPD.repeat_interleave(groups, 1), v_BgPD.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(
        q_BhRD, k_BgPD, v_BgPD, mask_RP, is_causal=mask_RP is None, scale=scale, enable_gqa=groups > 1
    )


def _seen(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[R, P] bool: the keys that the last `queries` of `keys` positions see."""
    distance_RP = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance_RP >= 0) & (distance_RP < window)


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
        return merged_chunk(q_hND, k_gPD, v_gPD, scale)
    return fused_chunk(q_hND[None], k_gPD[None], v_gPD[None], scale)[0]


def fused_chunk(q_BhND: Tensor, k_BgPD: Tensor, v_BgPD: Tensor, scale: float | None) -> Tensor:
    """[B, h, N, D] by torch's operators for a GPU, whose causal mask may begin after a prefix."""
    groups = q_BhND.shape[1] // k_BgPD.shape[1]
    if groups > 1 and q_BhND.dtype == torch.float32:  # flash does not take it, and the other kernel shares no keys
        k_BgPD, v_BgPD, groups = k_BgPD.repeat_interleave(groups, 1), v_BgPD.repeat_interleave(groups, 1), 1
    bias = causal_lower_right(q_BhND.shape[2], k_BgPD.shape[2])
    return F.scaled_dot_product_attention(q_BhND, k_BgPD, v_BgPD, bias, scale=scale, enable_gqa=groups > 1)


def merged_chunk(q_hND: Tensor, k_gPD: Tensor, v_gPD: Tensor, scale: float | None) -> Tensor:
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


def reference(
    q_BhTD: Tensor,
    k_BgTD: Tensor,
    v_BgTD: Tensor,
    documents: Documents | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """The twin of `causal`: all scores at once."""
    T, groups = q_BhTD.shape[2], q_BhTD.shape[1] // k_BgTD.shape[1]
    mask_BTT = _seen(T, T, window or T, q_BhTD.device)[None] if documents is None else documents.dense()
    if documents is not None and window is not None:
        mask_BTT = mask_BTT & _seen(T, T, window, q_BhTD.device)
    score_BhTT = q_BhTD @ k_BgTD.repeat_interleave(groups, 1).transpose(-1, -2) * (scale or q_BhTD.shape[-1] ** -0.5)
    share_BhTT = score_BhTT.masked_fill(~mask_BTT[:, None], -torch.inf).softmax(-1)
    return share_BhTT @ v_BgTD.repeat_interleave(groups, 1)
