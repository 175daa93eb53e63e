"""Rows in FP8 (e4m3), each with scales of its own, in one kernel.

Shapes: M rows, I numbers of a row, G groups of a row, S the lanes of one program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from drafttrain.kernels.triton.launch import Launch, enter
from torch import Tensor

NARROW = 8192  # numbers of a row up to which fewer warps serve


@triton.jit
def rows_kernel(x, code, scale, width, groups, across, along, LARGEST: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr):
    """One group of a row, of `width` numbers. across, along: strides of the scales."""
    enter(EARLY)
    n, at_S = tl.program_id(0).to(tl.int64), tl.arange(0, STEP)
    real_S = at_S < width
    x_S = tl.load(x + n * width + at_S, mask=real_S, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x_S), 0)
    own = tl.where(most > 0.0, tl.div_rn(most, LARGEST), 1.0)
    tl.store(code + n * width + at_S, tl.div_rn(x_S, own).to(code.dtype.element_ty), mask=real_S)
    tl.store(scale + n // groups * across + n % groups * along, own)


def rows(x_MI: Tensor, code_MI: Tensor, scale_MG: Tensor, largest: float) -> Launch:
    """The launch that fills the codes and the scales. x is contiguous."""
    groups = scale_MG.shape[1]
    width = x_MI.shape[-1] // groups
    arguments = {"x": x_MI, "code": code_MI, "scale": scale_MG, "width": width, "groups": groups, "LARGEST": largest}
    arguments |= {"across": scale_MG.stride(0), "along": scale_MG.stride(1)}
    step = triton.next_power_of_2(width)
    warps = 1 if step <= 256 else 8 if step <= NARROW else 16
    return Launch(rows_kernel, (len(x_MI) * groups,), arguments | {"STEP": step}, warps)
