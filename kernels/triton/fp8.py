"""Rows in FP8 (e4m3), each with a scale of its own, in one kernel.

Shapes: M rows, I numbers of a row, S the lanes of one program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from drafttrain.kernels.triton.launch import Launch
from torch import Tensor

NARROW = 8192  # numbers of a row up to which fewer warps serve


@triton.jit
def rows_kernel(x, code, scale, width, LARGEST: tl.constexpr, STEP: tl.constexpr):
    """One row."""
    m, at_S = tl.program_id(0).to(tl.int64), tl.arange(0, STEP)
    real_S = at_S < width
    x_S = tl.load(x + m * width + at_S, mask=real_S, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x_S), 0)
    own = tl.where(most > 0.0, tl.div_rn(most, LARGEST), 1.0)
    tl.store(code + m * width + at_S, tl.div_rn(x_S, own).to(code.dtype.element_ty), mask=real_S)
    tl.store(scale + m, own)


def rows(x_MI: Tensor, code_MI: Tensor, scale_M1: Tensor, largest: float) -> Launch:
    """The launch that fills the codes and the scales. x is contiguous."""
    width = x_MI.shape[-1]
    arguments = {"x": x_MI, "code": code_MI, "scale": scale_M1, "width": width, "LARGEST": largest}
    step = triton.next_power_of_2(width)
    warps = 1 if step <= 256 else 8 if step <= NARROW else 16
    return Launch(rows_kernel, (x_MI.numel() // width,), arguments | {"STEP": step}, warps)
