"""Norm and gate of a drafter's layer in training, one kernel for each direction. All sums are in float32.

Shapes: N rows, H numbers of a row, R parts of the rows, S the lanes of one step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from drafttrain.kernels.triton.launch import Launch
from torch import Tensor

STEP = 1024
PARTS = 256  # programs that share the rows in the norm's backward pass


@triton.jit
def gate_kernel(gate, up, out, count, STEP: tl.constexpr):
    """SiLU(gate) * up; the first factor is rounded as torch rounds it."""
    at_S = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    real_S = at_S < count
    g_S = tl.load(gate + at_S, mask=real_S, other=0.0).to(tl.float32)
    u_S = tl.load(up + at_S, mask=real_S, other=0.0).to(tl.float32)
    silu_S = (g_S / (1.0 + tl.exp(-g_S))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at_S, (silu_S * u_S).to(out.dtype.element_ty), mask=real_S)


@triton.jit
def gate_backward_kernel(grad, gate, up, to_gate, to_up, count, STEP: tl.constexpr):
    at_S = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    real_S = at_S < count
    d_S = tl.load(grad + at_S, mask=real_S, other=0.0).to(tl.float32)
    g_S = tl.load(gate + at_S, mask=real_S, other=0.0).to(tl.float32)
    u_S = tl.load(up + at_S, mask=real_S, other=0.0).to(tl.float32)
    share_S = 1.0 / (1.0 + tl.exp(-g_S))
    silu_S = g_S * share_S
    tl.store(to_gate + at_S, (d_S * u_S * (share_S + silu_S * (1.0 - share_S))).to(to_gate.dtype.element_ty), mask=real_S)
    tl.store(to_up + at_S, (d_S * silu_S).to(to_up.dtype.element_ty), mask=real_S)


@triton.jit
def norm_kernel(x, weight, out, scale, width, eps, STEP: tl.constexpr):
    """One row."""
    n, at_S = tl.program_id(0).to(tl.int64), tl.arange(0, STEP)
    real_S = at_S < width
    x_S = tl.load(x + n * width + at_S, mask=real_S, other=0.0).to(tl.float32)
    own = 1.0 / tl.sqrt(tl.sum(x_S * x_S, 0) / width + eps)
    weight_S = tl.load(weight + at_S, mask=real_S, other=0.0).to(tl.float32)
    normed_S = (x_S * own).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + n * width + at_S, (normed_S * weight_S).to(out.dtype.element_ty), mask=real_S)
    tl.store(scale + n, own)


@triton.jit
def norm_backward_kernel(grad, x, weight, scale, to_x, to_weight, rows, width, each, STEP: tl.constexpr):
    """Some rows; the sum of their parts of the weight's gradient is one row of to_weight."""
    part, at_S = tl.program_id(0).to(tl.int64), tl.arange(0, STEP)
    real_S, sum_S = at_S < width, tl.zeros([STEP], tl.float32)
    weight_S = tl.load(weight + at_S, mask=real_S, other=0.0).to(tl.float32)
    for n in range(part * each, tl.minimum(part * each + each, rows)):
        own = tl.load(scale + n)
        d_S = tl.load(grad + n * width + at_S, mask=real_S, other=0.0).to(tl.float32)
        normed_S = tl.load(x + n * width + at_S, mask=real_S, other=0.0).to(tl.float32) * own
        slope_S = d_S * weight_S
        along = tl.sum(slope_S * normed_S, 0) / width
        tl.store(to_x + n * width + at_S, ((slope_S - normed_S * along) * own).to(to_x.dtype.element_ty), mask=real_S)
        sum_S += d_S * normed_S
    tl.store(to_weight + part * width + at_S, sum_S, mask=real_S)


def gate(gate_I: Tensor, up_I: Tensor, out_I: Tensor) -> Launch:
    """The launch that fills out."""
    count = gate_I.numel()
    arguments = {"gate": gate_I, "up": up_I, "out": out_I, "count": count, "STEP": STEP}
    return Launch(gate_kernel, (triton.cdiv(count, STEP),), arguments, 4)


def gate_backward(grad_I: Tensor, gate_I: Tensor, up_I: Tensor, to_gate_I: Tensor, to_up_I: Tensor) -> Launch:
    """The launch that fills both gradients."""
    count = gate_I.numel()
    arguments = {"grad": grad_I, "gate": gate_I, "up": up_I, "to_gate": to_gate_I, "to_up": to_up_I}
    return Launch(gate_backward_kernel, (triton.cdiv(count, STEP),), arguments | {"count": count, "STEP": STEP}, 4)


def norm(x_NH: Tensor, weight_H: Tensor, eps: float, out_NH: Tensor, scale_N1: Tensor) -> Launch:
    """The launch that fills out, and each row's factor. Any leading dimensions are rows."""
    width = x_NH.shape[-1]
    arguments = {"x": x_NH, "weight": weight_H, "out": out_NH, "scale": scale_N1, "width": width, "eps": eps}
    return Launch(norm_kernel, (x_NH.numel() // width,), arguments | {"STEP": triton.next_power_of_2(width)}, 8)


def parts(x_NH: Tensor) -> Tensor:
    """[R, H] in float32, for the parts of the weight's gradient."""
    rows, width = x_NH.numel() // x_NH.shape[-1], x_NH.shape[-1]
    return x_NH.new_empty(min(PARTS, rows), width, dtype=torch.float32)


def norm_backward(
    grad_NH: Tensor, x_NH: Tensor, weight_H: Tensor, scale_N1: Tensor, to_x_NH: Tensor, to_weight_RH: Tensor
) -> Launch:
    """The launch that fills the gradient of x, and the parts of the weight's, which are to be added up."""
    programs, width = to_weight_RH.shape
    rows = x_NH.numel() // width
    arguments = {"grad": grad_NH, "x": x_NH, "weight": weight_H, "scale": scale_N1, "to_x": to_x_NH}
    arguments |= {"to_weight": to_weight_RH, "rows": rows, "width": width, "each": triton.cdiv(rows, programs)}
    return Launch(norm_backward_kernel, (programs,), arguments | {"STEP": triton.next_power_of_2(width)}, 8)
