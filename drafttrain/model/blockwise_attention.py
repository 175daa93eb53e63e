"""Attention of many blocks of slots, each to its own part of one context (arXiv 2602.06036, section 4; 2602.01469).

Blocks are computed a few at a time: no mask or score of all slots is in memory at once.

Shapes: B rows, T positions of the context, A blocks of a row, C of them at once, S slots of a block, R = C S, P = T + R keys,
h heads, D head width. Keys and values may have fewer heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafttrain.model.batch import Context

LEAST_TILE, MOST_TILE = 64, 512  # slots whose attention is computed at once in training


@dataclass(frozen=True, slots=True)
class Rule:
    """The keys that a slot sees, and the scale of its scores."""

    chained: bool = False  # a slot sees the slots of its block up to itself; False: all slots of its block
    window: int | None = None  # positions that a slot sees at most, its own included; slot 0 follows its context. None: all
    scale: float | None = None  # None: D ** -0.5


WHOLE = Rule()


def blockwise_attention(
    q_BhASD: Tensor,
    k_BhASD: Tensor,
    v_BhASD: Tensor,
    context_k_BhTD: Tensor,
    context_v_BhTD: Tensor,
    seen: Context,
    rule: Rule = WHOLE,
) -> Tensor:
    """[B, h, A, S, D]: every slot attends to slots of its own block and to its anchor's part of the context.

    With gradients the backward pass recomputes each tile: its keys, mask and scores are not stored.
    """
    A, S = q_BhASD.shape[2:4]
    slots = min(max(context_k_BhTD.shape[2] // 2, LEAST_TILE), MOST_TILE)  # scores between its blocks are masked, wasted
    blocks = max(1, slots // S)
    again, mixed = torch.is_grad_enabled() and blocks < A, []
    for own in zip(*(torch.split(x, blocks, 2) for x in (q_BhASD, k_BhASD, v_BhASD)), seen.split(blocks), strict=True):
        inputs = (*own, context_k_BhTD, context_v_BhTD, rule)
        mixed.append(checkpoint(_tile, *inputs, use_reentrant=False) if again else _tile(*inputs))
    return torch.cat(mixed, 2)


def _tile(
    q_BhCSD: Tensor, k_BhCSD: Tensor, v_BhCSD: Tensor, seen: Context, context_k_BhTD: Tensor, context_v_BhTD: Tensor, rule: Rule
) -> Tensor:
    C, S = q_BhCSD.shape[2:4]
    groups = q_BhCSD.shape[1] // k_BhCSD.shape[1]
    mask_B1RP = _mask(seen, C, S, context_k_BhTD.shape[2], rule)[:, None]
    keys, values = (
        torch.cat([context, _apart(own.flatten(2, 3))], 2).repeat_interleave(groups, 1)
        for context, own in ((context_k_BhTD, k_BhCSD), (context_v_BhTD, v_BhCSD))
    )
    mixed_BhRD = F.scaled_dot_product_attention(q_BhCSD.flatten(2, 3), keys, values, mask_B1RP, scale=rule.scale)
    return mixed_BhRD.view(*q_BhCSD.shape[:4], -1)


def _mask(seen: Context, blocks: int, slots: int, columns: int, rule: Rule) -> Tensor:
    """[B, R, P] bool: the keys that each slot of a tile sees."""
    context_BRT = seen.seen(columns).repeat_interleave(slots, 1)
    slot_S = torch.arange(slots, device=context_BRT.device)
    own_SS = torch.ones(slots, slots, dtype=torch.bool, device=slot_S.device)
    if rule.chained:
        own_SS = own_SS.tril()
    if rule.window is not None:
        own_SS = own_SS & (slot_S[:, None] - slot_S < rule.window)
        place_BR1 = (seen.last_BA[..., None] + 1 + slot_S).flatten(1)[..., None]
        context_BRT = context_BRT & (place_BR1 - torch.arange(columns, device=slot_S.device) < rule.window)
    same_CC = torch.eye(blocks, dtype=torch.bool, device=slot_S.device)
    own_RR = (same_CC[:, None, :, None] & own_SS[None, :, None]).flatten(2, 3).flatten(0, 1)
    return torch.cat([context_BRT, own_RR.expand(len(context_BRT), -1, -1)], 2)


def _apart(own_BhRD: Tensor) -> Tensor:
    """Copy the gradient: a view would keep the joined keys' whole gradient in memory until the last tile is done."""
    if own_BhRD.requires_grad:
        own_BhRD.register_hook(torch.clone)
    return own_BhRD
