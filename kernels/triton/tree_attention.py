"""Attention of a draft tree over the paged KV cache, with the keys split over programs (flash-decoding, Dao et al. 2023).

The query heads of one KV head are rows of one product, so that a key is read once for all of them. A program takes one block
of rows, one KV head and one range of keys. `combine` joins the ranges.

Shapes: B batch rows, N nodes, h query heads, G query heads per KV head, R rows of a program (node-major, N G in all), K keys
of a step, D value width, E numbers of a key after those that are its value. Keys are counted from the prefix's start; node i
of the tree is key length + i. The queries are the tree's last N nodes; `earlier` nodes precede them. A node's ancestors are
the bits of w words, 64 nodes in each. A batch row has S slots on average: one for each program that has a range of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from drafttrain.kernels.triton.launch import Launch, enter
from torch import Tensor

LOG2_E = 1.4426950408889634
LEAST_KEYS = 128  # per split: with fewer, joining the parts costs more than it saves
MOST_SPLITS = 128
MOST_WAVES = 8  # that are compared
START = 5  # steps that take as long as a program's start and end
# bytes of one block's parts up to which its last split joins them. It reads about 64 bytes a clock, alone: 1.2 us for these; a
# second launch on all processors starts 1 us later and takes 2.
MOST_JOINED = 128 << 10
PAIRS_SHARED = 228 << 10  # of a processor, for two programs of 64 rows
SMALL_SHARED = 64 << 10  # of a processor: less than three stages need
WORD = tl.constexpr(64)  # bits of an int64
IN_BITS = tl.constexpr(LOG2_E)  # a natural exponent times this is one of base 2
SMALL = tl.constexpr(0.3)  # up to which tanh's series is closer than the rounding of float32


@triton.jit
def _bits_from(words, real_R, node, WORDS: tl.constexpr):
    """[R]: the bits of 64 nodes of each row from `node` on, which may be negative; those of the prefix and past the tree are 0.

    words: where each row's words are.
    """
    at = (node + WORD) // WORD - 1  # rounded down
    low_R = tl.load(words + at, mask=real_R & (at >= 0) & (at < WORDS), other=0).to(tl.uint64, bitcast=True)
    high_R = tl.load(words + at + 1, mask=real_R & (at + 1 < WORDS), other=0).to(tl.uint64, bitcast=True)
    shift = (node - at * WORD).to(tl.uint64)
    # in two shifts, because a shift by 64 is undefined
    return (low_R >> shift) | ((high_R << 1) << (WORD - 1 - shift))


@triton.jit
def _seen(
    key_K, real_K, prefix, bits_R, words, real_R, position_R, position, window, earlier,
    WORDS: tl.constexpr, K: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """[R, K]: whether a row sees a key: the prefix and the node's ancestors, within the window.

    bits_R: the rows' words where they have one each. Otherwise a step has at most 64 keys. earlier: nodes before those that
    `position` names; they are within the window.
    """
    node_K = key_K - prefix
    if WORDS == 1:
        # clamped for lanes of the prefix and past the tree, because a shift by 64 or more is undefined
        shift_K = tl.minimum(tl.maximum(node_K, 0), WORD - 1)
        # the shift repeats bit 63, the sign bit; the mask removes the copies
        ancestor_RK = ((bits_R[:, None] >> shift_K[None, :].to(tl.int64)) & 1) != 0
    else:
        tl.static_assert(K <= WORD)
        step_R = _bits_from(words, real_R, tl.min(node_K, 0), WORDS)
        ancestor_RK = ((step_R[:, None] >> tl.arange(0, K)[None, :].to(tl.uint64)) & 1) != 0
    seen_RK = real_K[None, :] & ((node_K < 0)[None, :] | ancestor_RK)
    if WINDOWED:
        new_K = node_K - earlier
        place_K = tl.load(position + tl.maximum(new_K, 0), mask=real_K & (new_K >= 0), other=0).to(tl.int32)
        place_K = tl.where(new_K < 0, key_K, place_K)
        seen_RK = seen_RK & (position_R[:, None] - place_K[None, :] < window)
    return seen_RK


@triton.jit
def _tanh(power, FLOAT32: tl.constexpr):
    """tanh(x), where power = 2 x log2(e). FLOAT32: with float32's precision for small x too, where 1 - e^-2x loses it."""
    fall = tl.exp2(-tl.abs(power))  # does not overflow
    size = (1.0 - fall) / (1.0 + fall)
    out = tl.where(power < 0, -size, size)
    if FLOAT32:
        x = power * (0.5 / IN_BITS)
        square = x * x
        series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        out = tl.where(tl.abs(x) < SMALL, series, out)
    return out


@triton.jit
def _parts(x, keys):
    """x in the keys' format, and what that leaves of it."""
    high = x.to(keys.dtype.element_ty)
    return high, (x - high.to(tl.float32)).to(keys.dtype.element_ty)


@triton.jit
def _share(position_R, prefix, total, split, splits, window, K: tl.constexpr, WINDOWED: tl.constexpr):
    """(start, end) of the split's keys, in steps of K; two splits differ by one step at most. start == end: no keys.

    The splits divide the row's own length and not the bound, so that a graph for long rows uses all splits for short ones too.
    """
    first = 0
    if WINDOWED:  # no row of the block sees an earlier key
        first = tl.minimum(tl.maximum(tl.min(position_R, 0) - window + 1, 0), prefix) // K * K
    steps = tl.cdiv(total - first, K)
    start, end = split * steps // splits, (split + 1) * steps // splits
    return first + start * K, tl.minimum(first + end * K, total)


@triton.jit
def _ends(length, slots, batches, added, reach, K: tl.constexpr, BATCHES: tl.constexpr):
    """[BATCHES]: the end of each batch row's slots, of `slots` in all; BATCHES is `batches` or more.

    A batch row has one slot, and the others go to the rows in proportion to the keys that they read, `reach` at most. So the
    longest of ragged rows takes about as long as the others.
    """
    row_B = tl.arange(0, BATCHES)
    total_B = tl.load(length + row_B, mask=row_B < batches, other=0).to(tl.int64) + added
    steps_B = tl.where(row_B < batches, tl.cdiv(tl.minimum(total_B, reach), K), 0)
    shared_B = (slots - batches) * tl.cumsum(steps_B, 0) // tl.sum(steps_B, 0)
    return tl.minimum(row_B + 1, batches) + shared_B.to(tl.int32)


@triton.jit
def _slots(end_B, batch, slots, BATCHES: tl.constexpr):
    """(first, number) of the batch row's slots."""
    row_B = tl.arange(0, BATCHES)
    first = tl.max(tl.where(row_B < batch, end_B, 0), 0)
    return first, tl.min(tl.where(row_B < batch, slots, end_B), 0) - first


@triton.jit
def _joined(
    part, lse, first, splits, row_T, real_T, rows, D: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """[T, D]: the parts that a batch row's slots have of T of its `rows` (int64), weighted by exp(lse); zeros without keys.

    Other processors wrote the parts, so they are read past the processor's own cache. The loads of S splits do not wait for
    each other: a part is read whether its split saw a key or not.
    """
    d_D = tl.arange(0, WIDE)
    top_T, sum_T, out_TD = tl.full([T], float("-inf"), tl.float32), tl.zeros([T], tl.float32), tl.zeros([T, WIDE], tl.float32)
    for split in range(0, splits, S):
        for s in tl.static_range(S):
            there_T = real_T & (split + s < splits)
            at_T = rows * (first + split + s) + row_T
            lse_T = tl.load(lse + at_T, mask=there_T, other=float("-inf"), cache_modifier=".cg")
            there_TD = there_T[:, None] & (d_D < D)[None, :]
            part_TD = tl.load(part + at_T[:, None] * D + d_D[None, :], mask=there_TD, other=0.0, cache_modifier=".cg")
            part_TD = tl.where((lse_T > float("-inf"))[:, None], part_TD, 0.0)  # a split without keys wrote no part
            new_T = tl.maximum(top_T, lse_T)
            base_T = tl.where(new_T == float("-inf"), 0.0, new_T)
            decay_T, weight_T = tl.exp2(top_T - base_T), tl.exp2(lse_T - base_T)
            top_T, sum_T = new_T, sum_T * decay_T + weight_T
            out_TD = out_TD * decay_T[:, None] + part_TD * weight_T[:, None]
    return out_TD / tl.where(sum_T > 0, sum_T, 1.0)[:, None]


@triton.jit(do_not_specialize=["nodes", "earlier", "slots", "batches", "reach", "window", "table_B"])
def attend(
    q, keys, values, table, length, bits, position, out, part, lse, arrived, sinks, scale, steep, nodes, earlier, slots,
    batches, reach, window, q_B, q_N, q_h, table_B, GROUPS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, REST: tl.constexpr, REST_WIDE: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, WORDS: tl.constexpr, WINDOWED: tl.constexpr, BATCHES: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows, KV heads, slots. Writes `out`, or where rows of the batch have several slots `part` and `lse`.

    batches, reach: of `_ends`.

    arrived: zeros, one for each batch row, KV head and block of rows. The last split of each to arrive joins the parts, T rows
    at once and S splits at once, and puts the zero back. None: nobody joins them.

    A score's power of two is the product times `scale`, or with `steep` that of a capped score: scale tanh(x), where
    2 x log2(e) is the product times steep. sinks: of each query head; split 0 counts them. values None: they are the first D
    numbers of the keys, which have REST more. PARTS: 2 for a query in float32 with keys in a narrower format.
    """
    enter(EARLY)
    head, slot = tl.program_id(1), tl.program_id(2)
    if part is None:
        row, split, splits = slot, 0, 1
    elif BATCHES == 1:
        row, split, splits = 0, slot, slots
    else:
        end_B = _ends(length, slots, batches, earlier + nodes, reach, K, BATCHES)
        row = tl.sum((end_B <= slot).to(tl.int32), 0)
        first, splits = _slots(end_B, row, slots, BATCHES)
        split = slot - first
    batch = tl.full([], row, tl.int64)
    row_R, d_D, step_K = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, WIDE), tl.arange(0, K)
    node_R, head_R, real_R = row_R // GROUPS, head * GROUPS + row_R % GROUPS, row_R < nodes * GROUPS
    real_RD = real_R[:, None] & (d_D < D)[None, :]
    q_R1 = q + batch * q_B + (node_R * q_N + head_R * q_h)[:, None]
    q_RD = tl.load(q_R1 + d_D[None, :], mask=real_RD, other=0.0)
    if REST > 0:
        e_E = tl.arange(0, REST_WIDE)
        q_RE = tl.load(q_R1 + D + e_E[None, :], mask=real_R[:, None] & (e_E < REST)[None, :], other=0.0)
    if PARTS == 2:
        q_RD, low_RD = _parts(q_RD, keys)
        if REST > 0:
            q_RE, low_RE = _parts(q_RE, keys)
    table, position, keys = table + batch * table_B, position + batch * nodes, keys + head * (D + REST)
    if values is not None:
        values += head * D
    words = bits + (batch * nodes + node_R) * WORDS
    bits_R = tl.load(words, mask=real_R, other=0)
    position_R = tl.load(position + node_R, mask=real_R, other=1 << 30).to(tl.int32)

    prefix = tl.load(length + batch).to(tl.int32)
    total = prefix + earlier + nodes
    start, end = _share(position_R, prefix, total, split, splits, window, K, WINDOWED)
    top_R, sum_R, out_RD = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, WIDE], tl.float32)
    if sinks is not None:
        sink_R = tl.load(sinks + head_R).to(tl.float32) * IN_BITS
        top_R, sum_R = tl.where(split == 0, sink_R, top_R), tl.where(split == 0, 1.0, sum_R)
    # page numbers are loaded a step before their keys, and a lane past the row's end takes the last key's place
    page_K = tl.load(table + tl.minimum(start + step_K, total - 1) // PAGE)
    for k in range(start, end, K):
        key_K = tl.minimum(k + step_K, total - 1)
        at_K1 = ((page_K * PAGE + key_K % PAGE) * (KV * (D + REST)))[:, None]
        at_KD = at_K1 + d_D[None, :]
        there_KD = tl.full([K, 1], True, tl.int1) & (d_D < D)[None, :]
        k_KD = tl.load(keys + at_KD, mask=there_KD, other=0.0)
        v_KD = k_KD
        if values is not None:
            v_KD = tl.load(values + at_KD, mask=there_KD, other=0.0)
        page_K = tl.load(table + tl.minimum(k + K + step_K, total - 1) // PAGE)
        score_RK = tl.dot(q_RD, tl.trans(k_KD), input_precision="ieee")
        if PARTS == 2:
            score_RK = tl.dot(low_RD, tl.trans(k_KD), acc=score_RK)
        if REST > 0:
            there_KE = tl.full([K, 1], True, tl.int1) & (e_E < REST)[None, :]
            k_KE = tl.load(keys + at_K1 + D + e_E[None, :], mask=there_KE, other=0.0)
            score_RK = tl.dot(q_RE, tl.trans(k_KE), acc=score_RK, input_precision="ieee")
            if PARTS == 2:
                score_RK = tl.dot(low_RE, tl.trans(k_KE), acc=score_RK)
        if steep is not None:
            score_RK = _tanh(score_RK * steep, q_RD.dtype == tl.float32)
        if WINDOWED:
            # a node's rotary position is at most its place, so this hides no key that the node sees. Outside of the branch,
            # because Triton 3.6 compiles no product for sm_90 that only branches read
            score_RK = tl.where(position_R[:, None] - (k + step_K)[None, :] < window, score_RK, float("-inf"))
        if k + K > prefix:
            seen_RK = _seen(
                k + step_K, k + step_K < total, prefix, bits_R, words, real_R, position_R, position, window, earlier, WORDS, K,
                WINDOWED,
            )  # fmt: skip
            score_RK = tl.where(seen_RK, score_RK, float("-inf"))
        # the online softmax (Milakov & Gimelshein 2018): greatest score in powers of two, sum, weighted values
        new_R = tl.maximum(top_R, tl.max(score_RK, 1) * scale)
        base_R = tl.where(new_R == float("-inf"), 0.0, new_R)  # for a row that has seen no key yet
        weight_RK, decay_R = tl.exp2(score_RK * scale - base_R[:, None]), tl.exp2(top_R - base_R)
        out_RD = tl.dot(weight_RK.to(v_KD.dtype), v_KD, acc=out_RD * decay_R[:, None], input_precision="ieee")
        top_R, sum_R = new_R, sum_R * decay_R + tl.sum(weight_RK, 1)

    out_RD = out_RD / tl.where(sum_R > 0, sum_R, 1.0)[:, None]
    at_R, rows = node_R * (KV * GROUPS) + head_R, tl.full([], nodes * (KV * GROUPS), tl.int64)
    out += batch * rows * D
    if part is None:
        tl.store(out + at_R[:, None] * D + d_D[None, :], out_RD.to(out.dtype.element_ty), mask=real_RD)
    else:
        # a split without keys ran no step: its lse is -inf, and its part is not written. With sinks split 0 always has both
        at_R += slot * rows
        tl.store(lse + at_R, top_R + tl.log2(sum_R), mask=real_R)
        tl.store(part + at_R[:, None] * D + d_D[None, :], out_RD, mask=real_RD & (sum_R > 0)[:, None])
        if arrived is not None:
            tl.debug_barrier()  # every thread has written before one of them counts
            arrived += (batch * KV + head) * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
                for r in range(tl.program_id(0) * R, tl.minimum(tl.program_id(0) * R + R, nodes * GROUPS), T):
                    row_T = r + tl.arange(0, T)
                    at_T = row_T // GROUPS * (KV * GROUPS) + head * GROUPS + row_T % GROUPS
                    real_T = row_T < nodes * GROUPS
                    out_TD = _joined(part, lse, slot - split, splits, at_T, real_T, rows, D, WIDE, T, S)
                    real_TD = real_T[:, None] & (d_D < D)[None, :]
                    tl.store(out + at_T[:, None] * D + d_D[None, :], out_TD.to(out.dtype.element_ty), mask=real_TD)
                tl.store(arrived, 0)


@triton.jit(do_not_specialize=["rows", "slots", "batches", "added", "reach"])
def combine(
    part, lse, length, out, rows, slots, batches, added, reach, K: tl.constexpr, BATCHES: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, T: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: parts of T of the `rows`, one for each node and head, and batch rows. Joins what their slots found."""
    enter(EARLY)
    row_T, d_D, batch = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, WIDE), tl.program_id(1).to(tl.int64)
    if BATCHES == 1:
        first, splits = 0, slots
    else:
        first, splits = _slots(_ends(length, slots, batches, added, reach, K, BATCHES), batch, slots, BATCHES)
    out_TD = _joined(part, lse, first, splits, row_T, row_T < rows, tl.full([], rows, tl.int64), D, WIDE, T, S)
    there_TD = (row_T < rows)[:, None] & (d_D < D)[None, :]
    out += batch * rows * D
    tl.store(out + row_T[:, None] * D + d_D[None, :], out_TD.to(out.dtype.element_ty), mask=there_TD)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The size of a program's step, with the warps and pipeline stages for it."""

    rows: int
    keys: int
    warps: int
    stages: int  # steps whose keys and values have memory: all but one are on their way while one is computed
    programs: int = 1  # that share a processor


@dataclass(frozen=True, slots=True)
class Processors:
    """A device's streaming multiprocessors, and the bytes of shared memory of each."""

    count: int = 132  # of an H100, also for another kind of device, for tests
    shared: int = 228 << 10


def tiles(rows: int, wide: int, dtype: torch.dtype, words: int = 1, pairs: bool = True) -> Tiles:
    """The largest step whose accumulators stay in registers on sm_80 and sm_90 (measured with `Launch.compile`).

    words: of a node's ancestor bits; with several, a step has at most as many keys as a word has bits. pairs: a processor's
    shared memory holds two programs of 64 rows. They take the place of one with 128 where the last 128 rows would be at most
    half full: 65 nodes of 4 heads are 5 blocks of 64 rows, and not 3 of 128.
    """
    if dtype == torch.float32:  # products without tensor cores
        return Tiles(16, 16, 8 if wide > 256 else 4, 2)
    if wide > 256:  # with values that are a part of the keys; more rows have no registers for a query in two parts
        return Tiles(16, 32, 8, 3) if rows <= 16 else Tiles(32, 64, 8, 2)
    block = min(max(triton.next_power_of_2(rows), 16), 128 if wide <= 128 else 64)
    if block == 128 and 0 < rows % 128 <= 64 and pairs:
        return Tiles(64, 64, 4, 3, programs=2)
    keys = 32 if wide == 256 else 128 if block <= 32 and wide <= 64 and words == 1 else 64
    warps = 8 if block * wide >= 64 * 256 or block == 128 else 4
    return Tiles(block, keys, warps, 3)


def within(tile: Tiles, shared: int) -> Tiles:
    """The step where a processor has less shared memory, such as the 64 KiB of an MI300X: fewer steps, or half of the keys."""
    if shared > SMALL_SHARED:
        return tile
    return replace(tile, stages=2) if tile.stages > 2 else replace(tile, keys=min(tile.keys, 32))


@cache
def splits(groups: int, keys: int, rows: int, tile: Tiles, places: int) -> int:
    """The number of programs that share the keys of one block of rows: the one that takes the fewest steps.

    groups: blocks of rows of all KV heads and batch rows. places: programs that run at once. What exceeds them runs in another
    wave: 136 groups on 132 processors take 2 waves of all steps, and with 3 splits 4 waves of a third. A split writes and reads
    8 bytes per row, against 4 bytes per key and value, and that traffic must stay below the keys'. So no split gets fewer keys
    than there are rows.
    """
    steps, most = triton.cdiv(keys, tile.keys), max(1, min(keys // max(LEAST_KEYS, rows), MOST_SPLITS))

    def cost(split: int) -> tuple[int, int]:
        joining = triton.cdiv(2 * tile.rows, tile.keys) if split > 1 else 0  # its traffic, in steps
        return triton.cdiv(groups * split, places) * (triton.cdiv(steps, split) + START + joining), split

    return min({min(max(waves * places // groups, 1), most) for waves in range(1, MOST_WAVES + 1)}, key=cost)


@cache
def processors(device: torch.device) -> Processors:
    if device.type != "cuda":
        return Processors()
    of = torch.cuda.get_device_properties(device)
    return Processors(of.multi_processor_count, of.shared_memory_per_multiprocessor)


def launches(
    q_BNhD: Tensor, keys: Tensor, values: Tensor, table_BQ: Tensor, length_B: Tensor, bits_BNw: Tensor, position_BN: Tensor,
    out_BNI: Tensor, scale: float, window: int | None, bound: int, earlier: int, arrived: Tensor | None = None,
    cap: float | None = None, sinks_h: Tensor | None = None, tile: Tiles | None = None, most_joined: int = MOST_JOINED,
) -> list[Launch]:  # fmt: skip
    """The launches that fill out_BNI: one, or two where the keys are split and the last split does not join the parts. The host
    reads shapes and `bound`, no tensor.

    arrived: int32 zeros for the last splits, which are zeros again afterwards; None: a second launch joins. tile, most_joined:
    in place of what is chosen, to compare.
    """
    (B, N, h, whole), (_, page, kv, D) = q_BNhD.shape, values.shape
    rest = whole - D
    groups, wide, words = h // kv, max(triton.next_power_of_2(D), 16), bits_BNw.shape[2]
    of = processors(q_BNhD.device)
    tile = tile or within(tiles(N * groups, wide, keys.dtype, words, of.shared >= PAIRS_SHARED), of.shared)
    blocks = triton.cdiv(N * groups, tile.rows)
    reach = bound if window is None else min(bound, window + earlier + N)
    S = splits(B * kv * blocks, reach, N * groups, tile, of.count * tile.programs)
    part = lse = None
    if S > 1:
        part = q_BNhD.new_empty(S * B, N, h, D, dtype=torch.float32)
        lse = q_BNhD.new_empty(S * B, N, h, dtype=torch.float32)
    few = S * min(N * groups, tile.rows) * D * 4 <= most_joined
    if S == 1 or not few or arrived is None or len(arrived) < B * kv * blocks:
        arrived = None
    # rows that are joined at once
    together = min(triton.next_power_of_2(N * groups), tile.rows, max(512 * tile.warps // wide, 1))
    joined = {"T": together, "S": min(4096 * tile.warps // (together * wide), 16)}  # in 128 registers
    # kernels are compiled for one row and for up to 32
    shared = {"slots": S * B, "batches": B, "reach": reach, "K": tile.keys}
    shared["BATCHES"] = 1 if B == 1 else max(triton.next_power_of_2(B), 32)
    first = {
        "q": q_BNhD, "keys": keys, "values": None if rest else values, "table": table_BQ, "length": length_B,
        "bits": bits_BNw.contiguous(), "position": position_BN.contiguous(), "out": out_BNI, "part": part, "lse": lse,
        "arrived": arrived, "sinks": sinks_h, "scale": (scale if cap is None else cap) * LOG2_E,
        "steep": None if cap is None else 2 * scale * LOG2_E / cap, "nodes": N, "earlier": earlier,
        "window": window or 0, "q_B": q_BNhD.stride(0), "q_N": q_BNhD.stride(1), "q_h": q_BNhD.stride(2),
        "table_B": table_BQ.stride(0), "GROUPS": groups, "KV": kv, "D": D, "WIDE": wide, "REST": rest,
        "REST_WIDE": max(triton.next_power_of_2(rest), 16), "PARTS": 1 if q_BNhD.dtype == keys.dtype else 2, "PAGE": page,
        "R": tile.rows, "WORDS": words, "WINDOWED": window is not None, **shared, **joined,
    }  # fmt: skip
    found = [Launch(attend, (blocks, kv, S * B), first, tile.warps, tile.stages)]
    if S > 1 and arrived is None:
        rows = max(512 // wide, 1)
        second = {"part": part, "lse": lse, "length": length_B, "out": out_BNI, "rows": N * h, "added": earlier + N, **shared}
        second |= {"D": D, "WIDE": wide, "T": rows, "S": 8}
        found.append(Launch(combine, (triton.cdiv(N * h, rows), B), second, 4))
    return found
