"""Attention of a draft tree over the paged KV cache, with the keys split over programs (flash-decoding, Dao et al. 2023).

The query heads of one KV head are rows of one product, so that a key is read once for all of them. A program takes one block
of rows, one KV head and one range of keys. `combine` joins the ranges.

Shapes: B batch rows, N nodes, h query heads, G query heads per KV head, R rows of a program (node-major, N G in all), K keys
of a step, D head width, S splits. Keys are counted from the prefix's start; node i of the tree is key length + i. The queries
are the tree's last N nodes; `earlier` nodes precede them. A node's ancestors are the bits of w words, 64 nodes in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from drafttrain.kernels.triton.launch import Launch
from torch import Tensor

LOG2_E = 1.4426950408889634
WAVES = 1  # programs per processor
LEAST_KEYS = 128  # per split: with fewer, joining the parts costs more than it saves
MOST_SPLITS = 128
WORD = tl.constexpr(64)  # bits of an int64


@triton.jit
def _step(
    q_RD, keys, values, table, key_K, real_K, seen_RK, scale, top_R, sum_R, out_RD,
    STRIDE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (Milakov & Gimelshein 2018): greatest score in powers of two, sum, weighted values."""
    d_D = tl.arange(0, WIDE)
    page_K = tl.load(table + key_K // PAGE, mask=real_K, other=0)
    at_KD = ((page_K * PAGE + key_K % PAGE) * STRIDE)[:, None] + d_D[None, :]
    there_KD = real_K[:, None] & (d_D < D)[None, :]
    k_KD = tl.load(keys + at_KD, mask=there_KD, other=0.0)
    v_KD = tl.load(values + at_KD, mask=there_KD, other=0.0)
    score_RK = tl.dot(q_RD, tl.trans(k_KD), input_precision="ieee") * scale
    score_RK = tl.where(seen_RK, score_RK, float("-inf"))
    new_R = tl.maximum(top_R, tl.max(score_RK, 1))
    base_R = tl.where(new_R == float("-inf"), 0.0, new_R)  # for a row that has seen no key yet
    weight_RK = tl.exp2(score_RK - base_R[:, None])
    decay_R = tl.exp2(top_R - base_R)
    out_RD = tl.dot(weight_RK.to(v_KD.dtype), v_KD, acc=out_RD * decay_R[:, None], input_precision="ieee")
    return new_R, sum_R * decay_R + tl.sum(weight_RK, 1), out_RD


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
def _share(position_R, prefix, total, split, splits, window, K: tl.constexpr, WINDOWED: tl.constexpr):
    """(start, plain, end) of the split's keys, in steps of K; keys up to `plain` are all prefix. Past the row's end: no keys.

    The splits divide the row's own length and not the bound, so that a graph for long rows uses all splits for short ones too.
    """
    first = 0
    if WINDOWED:  # no row of the block sees an earlier key
        first = tl.minimum(tl.maximum(tl.min(position_R, 0) - window + 1, 0), prefix) // K * K
    share = tl.cdiv(tl.cdiv(total - first, K), splits) * K
    start = first + split * share
    end = tl.minimum(start + share, total)
    return start, tl.maximum(tl.minimum(end, prefix // K * K), start), end


@triton.jit(do_not_specialize=["nodes", "earlier", "splits", "window"])
def attend(
    q, keys, values, table, length, bits, position, out, part, lse, scale, nodes, earlier, splits, window,
    q_B, q_N, q_h, table_B, GROUPS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows, batch rows times KV heads, splits. Writes `out`; with SPLIT `part` and `lse` [S, ...]."""
    batch, head, split = (tl.program_id(1) // KV).to(tl.int64), tl.program_id(1) % KV, tl.program_id(2)
    row_R, d_D = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, WIDE)
    node_R, head_R, real_R = row_R // GROUPS, head * GROUPS + row_R % GROUPS, row_R < nodes * GROUPS
    real_RD = real_R[:, None] & (d_D < D)[None, :]
    q_RD = tl.load(q + batch * q_B + (node_R * q_N + head_R * q_h)[:, None] + d_D[None, :], mask=real_RD, other=0.0)
    table, position, keys, values = table + batch * table_B, position + batch * nodes, keys + head * D, values + head * D
    words = bits + (batch * nodes + node_R) * WORDS
    bits_R = tl.load(words, mask=real_R, other=0)
    position_R = tl.load(position + node_R, mask=real_R, other=1 << 30).to(tl.int32)

    prefix = tl.load(length + batch).to(tl.int32)
    total = prefix + earlier + nodes
    start, plain, end = _share(position_R, prefix, total, split, splits, window, K, WINDOWED)
    top_R, sum_R, out_RD = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, WIDE], tl.float32)
    for k in range(start, plain, K):
        key_K, real_K = k + tl.arange(0, K), tl.full([K], True, tl.int1)
        seen_RK = position_R[:, None] - key_K[None, :] < window if WINDOWED else real_K[None, :]
        top_R, sum_R, out_RD = _step(
            q_RD, keys, values, table, key_K, real_K, seen_RK, scale, top_R, sum_R, out_RD, KV * D, D, WIDE, PAGE
        )
    for k in range(plain, end, K):
        key_K, real_K = k + tl.arange(0, K), k + tl.arange(0, K) < total
        seen_RK = _seen(key_K, real_K, prefix, bits_R, words, real_R, position_R, position, window, earlier, WORDS, K, WINDOWED)
        top_R, sum_R, out_RD = _step(
            q_RD, keys, values, table, key_K, real_K, seen_RK, scale, top_R, sum_R, out_RD, KV * D, D, WIDE, PAGE
        )

    before = split.to(tl.int64) * (tl.num_programs(1) * nodes * GROUPS)  # rows of the splits before this one
    at_R = before + (batch * nodes + node_R) * (KV * GROUPS) + head_R
    out_RD, at_RD = out_RD / tl.where(sum_R > 0, sum_R, 1.0)[:, None], at_R[:, None] * D + d_D[None, :]
    if SPLIT:
        # a split past the row's end ran no step: its lse is -inf, and its part is neither written nor read
        tl.store(lse + at_R, top_R + tl.log2(sum_R), mask=real_R)
        tl.store(part + at_RD, out_RD, mask=real_RD & (sum_R > 0)[:, None])
    else:
        tl.store(out + at_RD, out_RD.to(out.dtype.element_ty), mask=real_RD)


@triton.jit(do_not_specialize=["splits"])
def combine(part, lse, out, splits, D: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr, S: tl.constexpr):
    """Joins the splits' parts of one node and head, weighted by exp(lse); zeros where no split saw a key."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    split_M = tl.arange(0, MOST)
    top = tl.max(tl.load(lse + split_M * rows + row, mask=split_M < splits, other=float("-inf")), 0)
    d_D = tl.arange(0, WIDE)
    sum_S, out_D = tl.zeros([S], tl.float32), tl.zeros([WIDE], tl.float32)
    for s in range(0, splits, S):
        split_S = s + tl.arange(0, S)
        lse_S = tl.load(lse + split_S * rows + row, mask=split_S < splits, other=float("-inf"))
        saw_S = lse_S > float("-inf")
        weight_S = tl.where(saw_S, tl.exp2(lse_S - top), 0.0)
        there_SD = saw_S[:, None] & (d_D < D)[None, :]
        part_SD = tl.load(part + (split_S * rows + row)[:, None] * D + d_D[None, :], mask=there_SD, other=0.0)
        sum_S += weight_S
        out_D += tl.sum(part_SD * weight_S[:, None], 0)
    total = tl.sum(sum_S, 0)
    out_D = out_D / tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + d_D, out_D.to(out.dtype.element_ty), mask=d_D < D)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The size of a program's step, with the warps and pipeline stages for it."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiles(rows: int, wide: int, dtype: torch.dtype, words: int = 1) -> Tiles:
    """The largest step whose accumulators stay in registers on sm_80 and sm_90 (measured with `Launch.compile`).

    words: of a node's ancestor bits; with several, a step has at most as many keys as a word has bits.
    """
    if dtype == torch.float32:  # products without tensor cores
        return Tiles(16, 16, 4, 2)
    block = min(max(triton.next_power_of_2(rows), 16), 128 if wide <= 128 else 64)
    few = block <= 16 if wide == 128 else block <= 32 and wide <= 64
    keys = 32 if wide == 256 else 128 if few and words == 1 else 64
    warps = 8 if block * wide >= 64 * 256 or block == 128 else 4
    # page numbers are loaded a step before their keys, so two steps of keys in flight take five stages
    return Tiles(block, keys, warps, 5)


def splits(programs: int, keys: int, rows: int, processors: int) -> int:
    """The number of programs that share the keys of one block of rows.

    There are at most as many as processors: on an H100 two per processor take 8 to 25 % longer. A split writes and reads 8
    bytes per row, against 4 bytes per key and value, and that traffic must stay below the keys'. So no split gets fewer keys
    than there are rows.
    """
    return max(1, min(WAVES * processors // programs, keys // max(LEAST_KEYS, rows), MOST_SPLITS))


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; 132 (H100) for another kind of device, for tests."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


def launches(
    q_BNhD: Tensor, keys: Tensor, values: Tensor, table_BQ: Tensor, length_B: Tensor, bits_BNw: Tensor, position_BN: Tensor,
    out_BNI: Tensor, scale: float, window: int | None, bound: int, earlier: int,
) -> list[Launch]:  # fmt: skip
    """The launches that fill out_BNI: one, or two where the keys are split. The host reads shapes and `bound`, no tensor."""
    B, N, h, D = q_BNhD.shape
    _, page, kv, _ = keys.shape
    groups, wide, words = h // kv, max(triton.next_power_of_2(D), 16), bits_BNw.shape[2]
    tile = tiles(N * groups, wide, q_BNhD.dtype, words)
    blocks = triton.cdiv(N * groups, tile.rows)
    reach = bound if window is None else min(bound, window + earlier + N)
    S = splits(B * kv * blocks, reach, N * groups, processors(q_BNhD.device))
    part = lse = out_BNI
    if S > 1:
        part = q_BNhD.new_empty(S, B, N, h, D, dtype=torch.float32)
        lse = q_BNhD.new_empty(S, B, N, h, dtype=torch.float32)
    first = {
        "q": q_BNhD, "keys": keys, "values": values, "table": table_BQ, "length": length_B, "bits": bits_BNw.contiguous(),
        "position": position_BN.contiguous(), "out": out_BNI, "part": part, "lse": lse, "scale": scale * LOG2_E, "nodes": N,
        "earlier": earlier, "splits": S, "window": window or 0, "q_B": q_BNhD.stride(0), "q_N": q_BNhD.stride(1),
        "q_h": q_BNhD.stride(2), "table_B": table_BQ.stride(0), "GROUPS": groups, "KV": kv, "D": D, "WIDE": wide, "PAGE": page,
        "R": tile.rows, "K": tile.keys, "WORDS": words, "WINDOWED": window is not None, "SPLIT": S > 1,
    }  # fmt: skip
    found = [Launch(attend, (blocks, B * kv, S), first, tile.warps, tile.stages)]
    if S > 1:
        second = {"part": part, "lse": lse, "out": out_BNI, "splits": S, "D": D, "WIDE": wide, "MOST": MOST_SPLITS, "S": 16}
        found.append(Launch(combine, (B * N * h,), second, 1))
    return found
