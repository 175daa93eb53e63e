"""Attention of many blocks of slots, each to its own part of one context (arXiv 2602.06036, section 4; 2602.01469).

Blocks are computed a few at a time, a tile: no mask or score of all slots is in memory at once. On a CPU a tile has only the
part of the context that its blocks see, and the backward pass gives torch's kernel each tile's output and log-sum-exp. On a
GPU `block_mask_attention` computes all blocks in one kernel in training, where it gives the tiles' results.

Shapes: B rows, T positions of the context, A blocks of a row, C of them at once, S slots of a block, R = C S, P keys of a
tile, h heads, g KV heads, x = h / g, X = x R, D head width. In one kernel: Q = A S queries, I tiles of them, J tiles of keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafttrain.model.batch import Context
from drafttrain.model.causal_attention import capped_attention, sinks_gradient, with_sinks

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
    sinks_h: Tensor | None = None,
) -> Tensor:
    """[B, h, A, S, D]: as `blockwise_attention` by the rule (chained, window, scale). attend: None: the compiled kernel.

    FlexAttention (arXiv 2412.05496), on a GPU: one kernel skips the keys that no slot sees.
    """
    A, S = q_BhASD.shape[2:4]
    keys, values = (
        torch.cat([context, block.flatten(2, 3)], 2)
        for context, block in ((context_k_BgTD, k_BgASD), (context_v_BgTD, v_BgASD))
    )
    mask = block_mask(seen, A, S, context_k_BgTD.shape[2], chained, window)
    shared = q_BhASD.shape[1] != k_BgASD.shape[1]
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": shared}
    if sinks_h is None:
        return (attend or _kernel())(q_BhASD.flatten(2, 3), keys, values, **options).unflatten(2, (A, S))
    from torch.nn.attention.flex_attention import AuxRequest

    out: Any = (attend or _kernel())(q_BhASD.flatten(2, 3), keys, values, **options, return_aux=AuxRequest(lse=True))
    return with_sinks(out[0], out[1].lse, sinks_h[:, None])[0].unflatten(2, (A, S))


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


LEAST_TILE, MOST_TILE = 64, 512  # slots whose attention is computed at once in training
aten = torch.ops.aten


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
    sinks_h: Tensor | None = None,
) -> Tensor:
    """[B, h, A, S, D]: every slot attends to slots of its own block and to its anchor's part of the context.

    Keys and values have g heads. sinks_h: one more score per query head, whose share of the softmax adds nothing. The backward
    pass makes each tile's keys and mask again, and on a GPU its attention: they are not stored.
    """
    A, S = q_BhASD.shape[2:4]
    if rule.window is not None:  # the columns that slot 0 sees; the tiles have no others
        seen = Context(torch.maximum(seen.first_BA, seen.last_BA + 2 - rule.window), seen.last_BA)
    if q_BhASD.device.type == "cpu":
        tiles = Tiles(seen, rule, max(1, LEAST_TILE // S), S)
        out_BhASD: Tensor = _Tiled.apply(tiles, sinks_h, q_BhASD, k_BhASD, v_BhASD, context_k_BhTD, context_v_BhTD)
        return out_BhASD
    if torch.is_grad_enabled() and _by_kernel(q_BhASD, sinks_h is not None):
        blocks = (q_BhASD, k_BhASD, v_BhASD, context_k_BhTD, context_v_BhTD)
        return block_mask_attention(*blocks, seen, rule.chained, rule.window, rule.scale, sinks_h=sinks_h)
    return _tiled(q_BhASD, k_BhASD, v_BhASD, context_k_BhTD, context_v_BhTD, seen, rule, sinks_h)


def _by_kernel(q_BhASD: Tensor, sinks: bool = False) -> bool:
    """Whether FlexAttention computes these blocks: not while a step's operations are counted, for which it has no rule."""
    if not q_BhASD.is_cuda or torch._C._len_torch_dispatch_stack():
        return False
    return _has_kernel(q_BhASD.device, q_BhASD.dtype, q_BhASD.shape[-1], sinks)


@cache
def _has_kernel(device: torch.device, dtype: torch.dtype, width: int, sinks: bool = False) -> bool:
    """Whether FlexAttention compiles here and agrees with the tiles; if not, a warning says why."""
    from torch._dynamo.exc import TorchDynamoException

    sizes = [(1, 4, 20, 8, width), *[(1, 2, 20, 8, width)] * 2, *[(1, 2, 150, width)] * 2, *[(4,)] * sinks]
    last_1A = torch.arange(7, 147, 7, device=device)[None]
    anchor_context, outputs = Context(torch.zeros_like(last_1A), last_1A), list[list[Tensor]]()
    try:
        with torch.enable_grad():
            for attend in (block_mask_attention, _tiled):
                random = torch.Generator(device).manual_seed(0)
                inputs = [torch.randn(size, generator=random, device=device, dtype=dtype) for size in sizes]
                q, k, v, context_k, context_v, *sink = (x.requires_grad_() for x in inputs)
                given: dict[str, Any] = {"sinks_h": sink[0]} if sinks else {}
                out = attend(q, k, v, context_k, context_v, anchor_context, **given)
                outputs.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        relative_error = max(
            float((a.detach() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in zip(*outputs, strict=True)
        )
        if relative_error > 5e-2:
            raise RuntimeError(f"its results are {relative_error:.1e} apart")
    except (TorchDynamoException, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        warnings.warn(f"FlexAttention is not used for blocks of slots, tiles are: {reason}", stacklevel=2)
        return False
    return True


def _tiled(
    q_BhASD: Tensor,
    k_BhASD: Tensor,
    v_BhASD: Tensor,
    context_k_BhTD: Tensor,
    context_v_BhTD: Tensor,
    anchor_context: Context,
    rule: Rule = WHOLE,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """Tile by tile, by torch's attention under a mask."""
    A, S = q_BhASD.shape[2:4]
    slots = min(max(context_k_BhTD.shape[2] // 2, LEAST_TILE), MOST_TILE)  # scores between its blocks are masked, wasted
    blocks = max(1, slots // S)
    recompute, outputs = torch.is_grad_enabled() and blocks < A, []
    for tile in zip(
        *(torch.split(x, blocks, 2) for x in (q_BhASD, k_BhASD, v_BhASD)), anchor_context.split(blocks), strict=True
    ):
        inputs = (*tile, context_k_BhTD, context_v_BhTD, rule, sinks_h)
        outputs.append(checkpoint(_tile, *inputs, use_reentrant=False) if recompute else _tile(*inputs))
    return torch.cat(outputs, 2)


def _tile(
    q_BhCSD: Tensor,
    k_BhCSD: Tensor,
    v_BhCSD: Tensor,
    anchor_context: Context,
    context_k_BhTD: Tensor,
    context_v_BhTD: Tensor,
    rule: Rule,
    sinks_h: Tensor | None,
) -> Tensor:
    (C, S, D), groups = q_BhCSD.shape[2:], q_BhCSD.shape[1] // k_BhCSD.shape[1]
    mask_BRP = _mask(anchor_context, C, S, context_k_BhTD.shape[2], rule)
    q_BhRD = q_BhCSD.flatten(2, 3)
    keys, values = (
        torch.cat([context, _apart(block.flatten(2, 3))], 2)
        for context, block in ((context_k_BhTD, k_BhCSD), (context_v_BhTD, v_BhCSD))
    )
    if sinks_h is not None:
        out_BhRD = capped_attention(q_BhRD, keys, values, rule.scale or D**-0.5, sinks_h=sinks_h, mask_BNP=mask_BRP)
    else:
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        out_BhRD = F.scaled_dot_product_attention(q_BhRD, keys, values, mask_BRP[:, None], scale=rule.scale)
    return out_BhRD.view(*q_BhCSD.shape[:4], -1)


class Tiles:
    """Which blocks are computed together on a CPU, and the columns of the context that they see."""

    def __init__(self, seen: Context, rule: Rule, blocks: int, slots: int) -> None:
        self.rule, self.slots = rule, slots
        tile_contexts = seen.split(blocks)
        low = torch.stack([tile_context.first_BA.min() for tile_context in tile_contexts]).tolist()
        high = torch.stack([tile_context.last_BA.max() + 1 for tile_context in tile_contexts]).tolist()
        self.columns = [slice(a, max(a, b)) for a, b in zip(low, high, strict=True)]
        starts = range(0, seen.last_BA.shape[1], blocks)
        self.blocks = [
            slice(a, a + tile_context.last_BA.shape[1]) for a, tile_context in zip(starts, tile_contexts, strict=True)
        ]
        self.parts = [
            Context(p.first_BA - c.start, p.last_BA - c.start) for p, c in zip(tile_contexts, self.columns, strict=True)
        ]

    def masks(self, groups: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
        """(blocks, columns, [B, 1, x R, P] what is added to the scores) of each tile."""
        for blocks, columns, tile_context in zip(self.blocks, self.columns, self.parts, strict=True):
            mask_BRP = _mask(tile_context, blocks.stop - blocks.start, self.slots, columns.stop - columns.start, self.rule)
            added_BRP = torch.zeros(mask_BRP.shape, dtype=dtype).masked_fill_(~mask_BRP, -torch.inf)
            yield blocks, columns, added_BRP[:, None].repeat(1, 1, groups, 1)


class _Tiled(torch.autograd.Function):
    """Attention of all tiles by torch's kernel for CPUs. The queries of the heads that share a KV head are rows of one."""

    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor
    ) -> Tensor:
        out_BhASD, logs, kv_heads = torch.empty_like(q, memory_format=torch.contiguous_format), [], k.shape[1]
        for blocks, columns, mask in tiles.masks(q.shape[1] // kv_heads, q.dtype):
            keys, values = _keys(k, context_k, blocks, columns), _keys(v, context_v, blocks, columns)
            rows_BgXD = _folded(q[:, :, blocks], kv_heads)
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            tile_out, log = kernel(rows_BgXD, keys, values, 0.0, False, attn_mask=mask, scale=tiles.rule.scale)
            if sinks is not None:
                tile_out, log = with_sinks(tile_out, log, _of_rows(sinks, log))
            out_BhASD[:, :, blocks] = _unfolded(tile_out, out_BhASD[:, :, blocks])
            logs.append(log)
        ctx.tiles, ctx.logs = tiles, logs
        ctx.save_for_backward(q, k, v, context_k, context_v, out_BhASD, sinks)
        return out_BhASD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, context_k, context_v, out_BhASD, sinks = ctx.saved_tensors
        to_q, to_k, to_v, to_context_k, to_context_v = (torch.zeros_like(x) for x in (q, k, v, context_k, context_v))
        tiles, kv_heads, kernel = ctx.tiles, k.shape[1], aten._scaled_dot_product_flash_attention_for_cpu_backward
        to_sinks = list[Tensor]()
        masks = tiles.masks(q.shape[1] // kv_heads, q.dtype)
        for (blocks, columns, mask), log in zip(masks, ctx.logs, strict=True):
            keys, values = _keys(k, context_k, blocks, columns), _keys(v, context_v, blocks, columns)
            grad, rows, tile_out = (_folded(x[:, :, blocks], kv_heads) for x in (grads[0], q, out_BhASD))
            if sinks is not None:
                to_row_gX = sinks_gradient(grad, tile_out, log, _of_rows(sinks, log))
                to_sinks.append(to_row_gX.view(len(sinks), -1).sum(1))
            tile_grads = kernel(grad, rows, keys, values, tile_out, log, 0.0, False, attn_mask=mask, scale=tiles.rule.scale)
            to_q[:, :, blocks] = _unfolded(tile_grads[0], to_q[:, :, blocks])
            width = columns.stop - columns.start
            for to_block, to_context, to_both in ((to_k, to_context_k, tile_grads[1]), (to_v, to_context_v, tile_grads[2])):
                to_context[:, :, columns] += to_both[:, :, :width]
                to_block[:, :, blocks] = to_both[:, :, width:].unflatten(2, (-1, tiles.slots))
        to_all_sinks = torch.stack(to_sinks).sum(0).to(sinks.dtype) if to_sinks else None
        return None, to_all_sinks, to_q, to_k, to_v, to_context_k, to_context_v


def _keys(block_BgASD: Tensor, context_BgTD: Tensor, blocks: slice, columns: slice) -> Tensor:
    """[B, g, P, D] the keys (or values) of a tile: of its part of the context, then of its own slots."""
    return torch.cat([context_BgTD[:, :, columns], block_BgASD[:, :, blocks].flatten(2, 3)], 2)


def _folded(x_BhCSD: Tensor, kv_heads: int) -> Tensor:
    """[B, g, x R, D]."""
    return x_BhCSD.unflatten(1, (kv_heads, -1)).flatten(2, 4)


def _unfolded(x_BgXD: Tensor, like_BhCSD: Tensor) -> Tensor:
    return x_BgXD.reshape(like_BhCSD.shape)


def _of_rows(sinks_h: Tensor, log_BgX: Tensor) -> Tensor:
    """[g, X] the sink of each row's query head."""
    g, X = log_BgX.shape[1:]
    return sinks_h.view(g, -1, 1).expand(-1, -1, X * g // len(sinks_h)).flatten(1)


def _mask(anchor_context: Context, blocks: int, slots: int, columns: int, rule: Rule) -> Tensor:
    """[B, R, P] bool: the keys that each slot of a tile sees."""
    context_BRT = anchor_context.seen(columns).repeat_interleave(slots, 1)
    slot_S = torch.arange(slots, device=context_BRT.device)
    block_SS = torch.ones(slots, slots, dtype=torch.bool, device=slot_S.device)
    if rule.chained:
        block_SS = block_SS.tril()
    if rule.window is not None:
        block_SS = block_SS & (slot_S[:, None] - slot_S < rule.window)
        position_BR1 = (anchor_context.last_BA[..., None] + 1 + slot_S).flatten(1)[..., None]
        context_BRT = context_BRT & (position_BR1 - torch.arange(columns, device=slot_S.device) < rule.window)
    same_block_CC = torch.eye(blocks, dtype=torch.bool, device=slot_S.device)
    block_RR = (same_block_CC[:, None, :, None] & block_SS[None, :, None]).flatten(2, 3).flatten(0, 1)
    return torch.cat([context_BRT, block_RR.expand(len(context_BRT), -1, -1)], 2)


def _apart(block_BhRD: Tensor) -> Tensor:
    """Copy the gradient: a view would keep the joined keys' whole gradient in memory until the last tile is done."""
    if block_BhRD.requires_grad:
        block_BhRD.register_hook(torch.clone)
    return block_BhRD
