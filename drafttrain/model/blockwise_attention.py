"""Attention of many blocks of slots, each with its own part of one context (arXiv 2602.06036, section 4; 2602.01469).

No mask or score of all slots at once is ever in memory: some blocks go at a time.

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
    """What a slot sees. chained: of its block the slots up to itself, else all. window: as many positions at most, the own one
    included, slot 0 standing right behind its part of the context; None: all. scale: of the scores; None: D ** -0.5.
    """

    chained: bool = False
    window: int | None = None
    scale: float | None = None


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
    """[B, h, A, S, D]: every slot attends to slots of its own block, and to what its anchor sees of the context.

    With gradients each tile is computed again in the backward pass: its keys, mask and scores are not kept.
    """
    A, S = q_BhASD.shape[2:4]
    slots = min(max(context_k_BhTD.shape[2] // 2, LEAST_TILE), MOST_TILE)  # a tile's blocks are keys to each other, in vain
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
    """[B, R, P] bool."""
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
    """Its gradient is copied: as a part of the joined keys' gradient it would hold all of that until the last tile is done."""
    if own_BhRD.requires_grad:
        own_BhRD.register_hook(torch.clone)
    return own_BhRD
