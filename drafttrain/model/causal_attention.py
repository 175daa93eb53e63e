"""Causal attention over whole sequences within documents; no tensor is [T, T].

Shapes: B rows, T positions, R queries of a block, P keys that they see, h heads, g KV heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.model.masks import Documents

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

    if documents is None or documents.span is None:
        return by_document(one, documents, q_BhTD, k_BgTD, v_BgTD)
    span = documents.span
    return span.scatter(by_document(one, documents, *(span.gather(x) for x in (q_BhTD, k_BgTD, v_BgTD))))


def by_document(function: Callable[..., Tensor], documents: Documents | None, *inputs: Tensor) -> Tensor:
    """[B, h, T, D]: the function's result over inputs [B, h, T, D], called for one document at a time."""
    if documents is None or all(len(lengths) == 1 for lengths in documents.lengths):
        return function(*inputs)
    rows = []
    for row, lengths in enumerate(documents.lengths):
        parts = zip(*(torch.split(x[row : row + 1], lengths, 2) for x in inputs), strict=True)
        rows.append(torch.cat([function(*part) for part in parts], 2))
    return torch.cat(rows)


def windowed(q_BhTD: Tensor, k_BgPD: Tensor, v_BgPD: Tensor, window: int, scale: float | None) -> Tensor:
    """[B, h, T, D] sliding-window attention, one block of queries at a time. The queries are the last T of P positions."""
    P, masks, mixed = k_BgPD.shape[2], dict[tuple[int, int], Tensor](), []
    before = P - q_BhTD.shape[2]
    for start in range(before, P, ROWS):
        stop, first = min(start + ROWS, P), max(0, start - window + 1)
        size = stop - start, stop - first
        if size not in masks:
            masks[size] = _seen(*size, window, q_BhTD.device)
        at, keys = slice(start - before, stop - before), slice(first, stop)
        mixed.append(_fused(q_BhTD[:, :, at], k_BgPD[:, :, keys], v_BgPD[:, :, keys], masks[size], scale))
    return torch.cat(mixed, 2)


def _fused(q_BhRD: Tensor, k_BgPD: Tensor, v_BgPD: Tensor, mask_RP: Tensor | None, scale: float | None) -> Tensor:
    """torch's attention: causal, or with the mask.

    On a GPU flash's and cuDNN's kernels share keys among heads and the memory-efficient kernel does not, so that keys are
    repeated for it; torch would otherwise compute all scores at once. By its sources torch tries cuDNN first on capability 9.0
    and 10.0 where cuDNN is newer than 9.15, and builds a plan for each new shape there; else, and with
    TORCH_CUDNN_SDPA_DEPRIORITIZED=1, it takes flash. gpu-bench times both.
    """
    groups = q_BhRD.shape[1] // k_BgPD.shape[1]
    if q_BhRD.is_cuda and groups > 1 and (mask_RP is not None or q_BhRD.dtype == torch.float32):
        k_BgPD, v_BgPD, groups = k_BgPD.repeat_interleave(groups, 1), v_BgPD.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(
        q_BhRD, k_BgPD, v_BgPD, mask_RP, is_causal=mask_RP is None, scale=scale, enable_gqa=groups > 1
    )


def _seen(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[R, P] bool: the keys that the last `queries` of `keys` positions see."""
    back_RP = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (back_RP >= 0) & (back_RP < window)


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
    seen_BTT = _seen(T, T, window or T, q_BhTD.device)[None] if documents is None else documents.dense()
    if documents is not None and window is not None:
        seen_BTT = seen_BTT & _seen(T, T, window, q_BhTD.device)
    score_BhTT = q_BhTD @ k_BgTD.repeat_interleave(groups, 1).transpose(-1, -2) * (scale or q_BhTD.shape[-1] ** -0.5)
    share_BhTT = score_BhTT.masked_fill(~seen_BTT[:, None], -torch.inf).softmax(-1)
    return share_BhTT @ v_BgTD.repeat_interleave(groups, 1)
