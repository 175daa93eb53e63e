"""Attention of a drafter that is trained on its own outputs, to its later steps: each query sees one key of each, that of its
own index. One kernel for each direction. All sums are in float32.

A program takes one KV head and a block of positions, and the query heads that share the KV head one after the other.

Shapes: B rows, T positions, R positions of a program, I later steps, h heads, g KV heads, D head width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from drafttrain.kernels.triton.launch import Launch
from torch import Tensor

NUMBERS = 2048  # of a program's block of positions, so that its vectors stay in registers


@triton.jit
def _tile(x, batch, head, t_R, d_D, x_B, x_h, x_T, real_RD):
    """[R, D] in float32: a block of positions of one head."""
    at_RD = batch * x_B + head * x_h + (t_R * x_T)[:, None] + d_D[None, :]
    return tl.load(x + at_RD, mask=real_RD, other=0.0).to(tl.float32)


@triton.jit
def _keys(x, step, at_RD, all_BgTD, real_RD):
    """[R, D] in float32: one later step's block of positions."""
    return tl.load(x + step * all_BgTD + at_RD, mask=real_RD, other=0.0).to(tl.float32)


@triton.jit
def merge_kernel(
    q, first, lse, keys, values, out, joint, scale, steps, positions,
    q_B, q_h, q_T, first_B, first_h, first_T, out_B, out_h, out_T,
    GROUPS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov & Gimelshein 2018), from step 0's output and log-sum-exp on."""
    batch, kv = (tl.program_id(1) // KV).to(tl.int64), (tl.program_id(1) % KV).to(tl.int64)
    t_R, d_D = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, WIDE)
    real_R = t_R < positions
    real_RD = real_R[:, None] & (d_D < D)[None, :]
    all_BgTD = (tl.num_programs(1) * positions).to(tl.int64) * D
    own_RD = ((batch * KV + kv) * positions + t_R)[:, None] * D + d_D[None, :]
    for group in range(GROUPS):
        head = kv * GROUPS + group
        at_R = (batch * KV * GROUPS + head) * positions + t_R
        q_RD = _tile(q, batch, head, t_R, d_D, q_B, q_h, q_T, real_RD)
        out_RD = _tile(first, batch, head, t_R, d_D, first_B, first_h, first_T, real_RD)
        top_R, sum_R = tl.load(lse + at_R, mask=real_R, other=0.0), tl.full([R], 1.0, tl.float32)
        for step in range(steps):
            score_R = tl.sum(q_RD * _keys(keys, step, own_RD, all_BgTD, real_RD), 1) * scale
            new_R = tl.maximum(top_R, score_R)
            decay_R, weight_R = tl.exp(top_R - new_R), tl.exp(score_R - new_R)
            out_RD = out_RD * decay_R[:, None] + weight_R[:, None] * _keys(values, step, own_RD, all_BgTD, real_RD)
            top_R, sum_R = new_R, sum_R * decay_R + weight_R
        at_RD = batch * out_B + head * out_h + (t_R * out_T)[:, None] + d_D[None, :]
        tl.store(out + at_RD, (out_RD / sum_R[:, None]).to(out.dtype.element_ty), mask=real_RD)
        tl.store(joint + at_R, top_R + tl.log(sum_R), mask=real_R)


@triton.jit
def merge_backward_kernel(
    grad, q, out, joint, keys, values, to_q, to_keys, to_values, scale, steps, positions,
    grad_B, grad_h, grad_T, q_B, q_h, q_T, out_B, out_h, out_T, to_B, to_h, to_T,
    GROUPS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Adds to to_q, and fills to_keys and to_values [I, B, g, T, D]. The shares are computed twice: once for the queries'
    gradient, head by head, and once for the keys' and values', step by step.
    """
    batch, kv = (tl.program_id(1) // KV).to(tl.int64), (tl.program_id(1) % KV).to(tl.int64)
    t_R, d_D = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, WIDE)
    real_R = t_R < positions
    real_RD = real_R[:, None] & (d_D < D)[None, :]
    all_BgTD = (tl.num_programs(1) * positions).to(tl.int64) * D
    own_RD = ((batch * KV + kv) * positions + t_R)[:, None] * D + d_D[None, :]
    for group in range(GROUPS):
        head = kv * GROUPS + group
        q_RD = _tile(q, batch, head, t_R, d_D, q_B, q_h, q_T, real_RD)
        grad_RD = _tile(grad, batch, head, t_R, d_D, grad_B, grad_h, grad_T, real_RD)
        mean_R = tl.sum(grad_RD * _tile(out, batch, head, t_R, d_D, out_B, out_h, out_T, real_RD), 1)
        joint_R = tl.load(joint + (batch * KV * GROUPS + head) * positions + t_R, mask=real_R, other=0.0)
        sum_RD = tl.zeros([R, WIDE], tl.float32)
        for step in range(steps):
            k_RD = _keys(keys, step, own_RD, all_BgTD, real_RD)
            share_R = tl.exp(tl.sum(q_RD * k_RD, 1) * scale - joint_R)
            to_share_R = tl.sum(grad_RD * _keys(values, step, own_RD, all_BgTD, real_RD), 1) - mean_R
            sum_RD += (share_R * to_share_R * scale)[:, None] * k_RD
        at_RD = batch * to_B + head * to_h + (t_R * to_T)[:, None] + d_D[None, :]
        before_RD = tl.load(to_q + at_RD, mask=real_RD, other=0.0).to(tl.float32)
        tl.store(to_q + at_RD, (before_RD + sum_RD).to(to_q.dtype.element_ty), mask=real_RD)
    for step in range(steps):
        k_RD, v_RD = _keys(keys, step, own_RD, all_BgTD, real_RD), _keys(values, step, own_RD, all_BgTD, real_RD)
        to_k_RD, to_v_RD = tl.zeros([R, WIDE], tl.float32), tl.zeros([R, WIDE], tl.float32)
        for group in range(GROUPS):
            head = kv * GROUPS + group
            q_RD = _tile(q, batch, head, t_R, d_D, q_B, q_h, q_T, real_RD)
            grad_RD = _tile(grad, batch, head, t_R, d_D, grad_B, grad_h, grad_T, real_RD)
            mean_R = tl.sum(grad_RD * _tile(out, batch, head, t_R, d_D, out_B, out_h, out_T, real_RD), 1)
            joint_R = tl.load(joint + (batch * KV * GROUPS + head) * positions + t_R, mask=real_R, other=0.0)
            share_R = tl.exp(tl.sum(q_RD * k_RD, 1) * scale - joint_R)
            slope_R = share_R * (tl.sum(grad_RD * v_RD, 1) - mean_R) * scale
            to_k_RD += slope_R[:, None] * q_RD
            to_v_RD += share_R[:, None] * grad_RD
        tl.store(to_keys + step * all_BgTD + own_RD, to_k_RD.to(to_keys.dtype.element_ty), mask=real_RD)
        tl.store(to_values + step * all_BgTD + own_RD, to_v_RD.to(to_values.dtype.element_ty), mask=real_RD)


def merge(
    q_BhTD: Tensor, first_BhTD: Tensor, lse_BhT: Tensor, keys_IBgTD: Tensor, values_IBgTD: Tensor,
    out_BhTD: Tensor, joint_BhT: Tensor,
) -> Launch:  # fmt: skip
    """The launch that fills out and joint. lse, keys, values and joint are contiguous."""
    arguments = {"q": q_BhTD, "first": first_BhTD, "lse": lse_BhT, "keys": keys_IBgTD, "values": values_IBgTD, "out": out_BhTD}
    arguments |= {"joint": joint_BhT} | _sizes(q_BhTD, keys_IBgTD)
    arguments |= _strides("q", q_BhTD) | _strides("first", first_BhTD) | _strides("out", out_BhTD)
    return Launch(merge_kernel, _grid(keys_IBgTD), arguments, 4)


def merge_backward(
    grad_BhTD: Tensor, q_BhTD: Tensor, out_BhTD: Tensor, joint_BhT: Tensor, keys_IBgTD: Tensor, values_IBgTD: Tensor,
    to_q_BhTD: Tensor, to_keys_IBgTD: Tensor, to_values_IBgTD: Tensor,
) -> Launch:  # fmt: skip
    """The launch that adds to to_q and fills to_keys and to_values. joint, keys, values and their gradients are contiguous."""
    arguments = {
        "grad": grad_BhTD,
        "q": q_BhTD,
        "out": out_BhTD,
        "joint": joint_BhT,
        "keys": keys_IBgTD,
        "values": values_IBgTD,
    }
    arguments |= {"to_q": to_q_BhTD, "to_keys": to_keys_IBgTD, "to_values": to_values_IBgTD} | _sizes(q_BhTD, keys_IBgTD)
    arguments |= _strides("grad", grad_BhTD) | _strides("q", q_BhTD) | _strides("out", out_BhTD) | _strides("to", to_q_BhTD)
    return Launch(merge_backward_kernel, _grid(keys_IBgTD), arguments, 4)


def _sizes(q_BhTD: Tensor, keys_IBgTD: Tensor) -> dict[str, float | int]:
    I, _, g, T, D = keys_IBgTD.shape  # noqa: E741
    found = {"scale": D**-0.5, "steps": I, "positions": T, "GROUPS": q_BhTD.shape[1] // g, "KV": g, "D": D}
    return found | {"WIDE": _wide(D), "R": NUMBERS // _wide(D)}


def _strides(name: str, x_BhTD: Tensor) -> dict[str, int]:
    return dict(zip((f"{name}_B", f"{name}_h", f"{name}_T"), x_BhTD.stride()[:3], strict=True))


def _grid(keys_IBgTD: Tensor) -> tuple[int, int]:
    _, B, g, T, D = keys_IBgTD.shape
    return triton.cdiv(T, NUMBERS // _wide(D)), B * g


def _wide(width: int) -> int:
    return max(triton.next_power_of_2(width), 16)
