"""Attention over whole sequences, with or without chains of mask slots after them.

Shapes: B rows, T columns of text, S slots of a chain, N all columns, h heads, g KV heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.model.blockwise_attention import Rule, blockwise_attention
from drafttrain.model.causal_attention import causal
from drafttrain.model.mask_chains import Chains
from drafttrain.model.masks import Documents


def attended(
    q_BhND: Tensor,
    k_BgND: Tensor,
    v_BgND: Tensor,
    documents: Documents | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """[B, h, N, D]: `causal`, or for `Chains` attention of every slot to its anchor's part of the text and the slots before it.

    No score or mask of all columns is in memory at once.
    """
    if not isinstance(documents, Chains):
        return causal(q_BhND, k_BgND, v_BgND, documents, window, scale)
    sizes, span = [documents.columns, *(group.slots for group in documents.groups)], documents.span
    text, *chains = zip(*(torch.split(x, sizes, 2) for x in (q_BhND, k_BgND, v_BgND)), strict=True)
    q_BhTD, k_BgTD, v_BgTD = text
    outputs = [causal(q_BhTD, k_BgTD, v_BgTD, documents.text, window, scale)]
    if span is not None:
        k_BgTD, v_BgTD = span.gather(k_BgTD), span.gather(v_BgTD)
    for group, chain_qkv in zip(documents.groups, chains, strict=True):
        slots = chain_qkv if span is None else [span.heads(x) for x in chain_qkv]
        q_BhASD, k_BgASD, v_BgASD = (x.reshape(*x.shape[:2], -1, group.size, x.shape[-1]) for x in slots)
        rule = Rule(chained=True, window=window, scale=scale)
        out_BhXD = blockwise_attention(q_BhASD, k_BgASD, v_BgASD, k_BgTD, v_BgTD, group.seen, rule).flatten(2, 3)
        outputs.append(out_BhXD if span is None else span.positions(out_BhXD))
    return torch.cat(outputs, 2)


def reference(
    q_BhND: Tensor, k_BgND: Tensor, v_BgND: Tensor, chains: Chains, window: int | None = None, scale: float | None = None
) -> Tensor:
    """The twin of `attended`: all scores at once; a window counts rotary positions."""
    mask_BNN, groups = chains.dense(), q_BhND.shape[1] // k_BgND.shape[1]
    if window is not None:
        mask_BNN = mask_BNN & (chains.position_BN[..., None] - chains.position_BN[:, None] < window)
    score_BhNN = q_BhND @ k_BgND.repeat_interleave(groups, 1).transpose(-1, -2) * (scale or q_BhND.shape[-1] ** -0.5)
    share_BhNN = score_BhNN.masked_fill(~mask_BNN[:, None], -torch.inf).softmax(-1)
    return share_BhNN @ v_BgND.repeat_interleave(groups, 1)
