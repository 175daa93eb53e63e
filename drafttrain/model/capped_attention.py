"""Attention whose scores are soft-capped (Gemma-2, arXiv 2408.00118, section 2) or share their softmax with sinks (gpt-oss).

torch's fused attention has neither. The queries are taken in parts, so that memory never holds the scores of all pairs.

Shapes: B rows, N queries, P keys, h heads, g KV heads, r query heads of a KV head, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """[B, h, N, D] with float32 scores. The values may have another width than the keys, as the result then has.

    mask_BNP: true where a query sees a key; None: the queries are the last N of P positions, causal within the window.
    cap: scores become cap * tanh(score / cap). sinks_h: one more score per head, whose share of the softmax goes nowhere.
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
