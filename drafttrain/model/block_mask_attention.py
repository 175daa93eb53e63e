"""Attention of blocks of slots by FlexAttention (arXiv 2412.05496), on a GPU: one kernel skips the keys that no slot sees.

Shapes: B rows, T positions of the context, A blocks of a row, S slots of a block, Q = A S queries, K = T + Q keys, h heads,
g KV heads, D head width, I tiles of queries, J tiles of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from drafttrain.model.batch import Context

TILE = 128  # queries, and keys, that the kernel computes together

Attend = Callable[..., Tensor]


def block_mask_attention(
    q_BhASD: Tensor,
    k_BgASD: Tensor,
    v_BgASD: Tensor,
    context_k_BgTD: Tensor,
    context_v_BgTD: Tensor,
    seen: Context,
    chained: bool = False,
    window: int | None = None,
    scale: float | None = None,
    attend: Attend | None = None,
) -> Tensor:
    """[B, h, A, S, D]: as `blockwise_attention` by the rule (chained, window, scale). attend: None: the compiled kernel."""
    A, S = q_BhASD.shape[2:4]
    keys, values = (
        torch.cat([context, block.flatten(2, 3)], 2)
        for context, block in ((context_k_BgTD, k_BgASD), (context_v_BgTD, v_BgASD))
    )
    mask = block_mask(seen, A, S, context_k_BgTD.shape[2], chained, window)
    shared = q_BhASD.shape[1] != k_BgASD.shape[1]
    out_BhQD = (attend or _kernel())(q_BhASD.flatten(2, 3), keys, values, block_mask=mask, scale=scale, enable_gqa=shared)
    return out_BhQD.unflatten(2, (A, S))


def mask_of(seen: Context, slots: int, columns: int, chained: bool, window: int | None) -> Callable[..., Tensor]:
    """(row, head, query, key) -> whether the query sees the key: a mask_mod. Keys are the context's, then the slots'.

    Sizes are tensors: numbers would compile the kernel again for each length.
    """
    first_BA, last_BA = seen.first_BA, seen.last_BA
    T, S, A = (torch.tensor(x, device=first_BA.device) for x in (columns, slots, first_BA.shape[1]))

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = torch.minimum(query // S, A - 1), query % S
        first, last, slot_key = first_BA[row, block], last_BA[row, block], key - T
        in_context = (key < T) & (key >= first) & (key <= last)
        in_block = (slot_key >= 0) & (slot_key // S == block)
        if chained:
            in_block = in_block & (slot_key % S <= slot)
        if window is not None:
            in_context = in_context & (last + 1 + slot - key < window)
            in_block = in_block & (slot - slot_key % S < window)
        return in_context | in_block

    return sees


def block_mask(seen: Context, blocks: int, slots: int, columns: int, chained: bool, window: int | None) -> Any:
    """The `BlockMask`: tiles of keys that some query of a tile of queries may see. No mask of all queries and keys is made."""
    from torch.nn.attention.flex_attention import BlockMask

    visible_BIJ = tiles(seen, blocks, slots, columns)
    count_BI = visible_BIJ.sum(-1, dtype=torch.int32)
    index_BIJ = visible_BIJ.int().argsort(dim=-1, descending=True, stable=True).int()
    rule, queries = mask_of(seen, slots, columns, chained, window), blocks * slots
    return BlockMask.from_kv_blocks(
        count_BI[:, None],
        index_BIJ[:, None],
        BLOCK_SIZE=TILE,
        mask_mod=rule,
        seq_lengths=(queries, columns + queries),
    )


def tiles(seen: Context, blocks: int, slots: int, columns: int) -> Tensor:
    """[B, I, J] bool: whether a tile of keys may hold one that a query of the tile sees.

    A tile of queries sees the columns from its blocks' first to their last one, and the slots of these blocks.
    """
    device, queries = seen.first_BA.device, blocks * slots
    start_I = torch.arange(0, queries, TILE, device=device)
    low_I, high_I = start_I // slots, (start_I + TILE - 1).clamp_max(queries - 1) // slots  # of a tile's blocks
    block_A = torch.arange(blocks, device=device)
    within_IA = (block_A >= low_I[:, None]) & (block_A <= high_I[:, None])
    first_BI = seen.first_BA[:, None].masked_fill(~within_IA, columns).amin(-1)
    last_BI = seen.last_BA[:, None].masked_fill(~within_IA, -1).amax(-1)
    start_J = torch.arange(0, columns + queries, TILE, device=device)
    of_context_BIJ = (start_J <= last_BI[..., None]) & (start_J + TILE > first_BI[..., None]) & (start_J < columns)
    own_low_I1, own_high_I1 = (columns + low_I * slots)[:, None], (columns + (high_I + 1) * slots)[:, None]
    return of_context_BIJ | ((start_J < own_high_I1) & (start_J + TILE > own_low_I1))


@cache
def _kernel() -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Attend = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled
