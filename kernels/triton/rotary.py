"""Rotary positions (Su et al. 2021) of queries and keys, one kernel for both directions. Products and sums are in float32.

Shapes: B rows, N positions, h heads, D head width, F = D / 2 rounded up to a power of two, R pairs of a
position and a head in one program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from drafttrain.kernels.triton.launch import Launch
from torch import Tensor

LANES = 1024  # of one program: R times F
HEADS = 4  # of one program at most; they read the same angles


@triton.jit(do_not_specialize=["positions", "heads"])
def rotary_kernel(
    x, cos, sin, out, positions, heads, x_b, x_n, x_h, angle_b, angle_n, out_b, out_n, out_h,
    HALF: tl.constexpr, F: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, SIGNED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Some positions of some heads. SIGNED: the first half of each sine is negated. BACK: the transposed map, of gradients."""
    program, groups = tl.program_id(0).to(tl.int64), tl.cdiv(heads, HEADS)
    blocks = tl.cdiv(positions, R // HEADS)
    block, b = program // groups % blocks, program // groups // blocks
    lane_R, at_1F = tl.arange(0, R), tl.arange(0, F)[None, :]
    h_R, n_R = program % groups * HEADS + lane_R % HEADS, block * (R // HEADS) + lane_R // HEADS
    real_RF = ((h_R < heads) & (n_R < positions))[:, None] & (at_1F < HALF)
    x_RF = x + (b * x_b + n_R * x_n + h_R * x_h)[:, None] + at_1F
    angle_RF = (b * angle_b + n_R * angle_n)[:, None] + at_1F
    first_RF = tl.load(x_RF, mask=real_RF, other=0.0).to(tl.float32)
    second_RF = tl.load(x_RF + HALF, mask=real_RF, other=0.0).to(tl.float32)
    cos_first_RF = tl.load(cos + angle_RF, mask=real_RF, other=0.0).to(tl.float32)
    cos_second_RF = tl.load(cos + angle_RF + HALF, mask=real_RF, other=0.0).to(tl.float32)
    sin_first_RF = tl.load(sin + angle_RF, mask=real_RF, other=0.0).to(tl.float32)
    sin_second_RF = tl.load(sin + angle_RF + HALF, mask=real_RF, other=0.0).to(tl.float32)
    if not SIGNED:
        sin_first_RF = -sin_first_RF
    if BACK:
        sin_first_RF, sin_second_RF = sin_second_RF, sin_first_RF
    out_RF = out + (b * out_b + n_R * out_n + h_R * out_h)[:, None] + at_1F
    dtype = out.dtype.element_ty
    tl.store(out_RF, (first_RF * cos_first_RF + second_RF * sin_first_RF).to(dtype), mask=real_RF)
    tl.store(out_RF + HALF, (second_RF * cos_second_RF + first_RF * sin_second_RF).to(dtype), mask=real_RF)


def launch(x_BNhD: Tensor, cos_BND: Tensor, sin_BND: Tensor, out_BNhD: Tensor, signed: bool, back: bool) -> Launch:
    """The launch that fills out. The last dimension of each is contiguous; the angles have the same strides."""
    B, N, h, D = x_BNhD.shape
    F, near = triton.next_power_of_2(D // 2), min(HEADS, triton.next_power_of_2(h))
    R = max(near, LANES // F)
    sizes = {"positions": N, "heads": h, "angle_b": cos_BND.stride(0), "angle_n": cos_BND.stride(1)}
    for name, tensor in (("x", x_BNhD), ("out", out_BNhD)):
        sizes |= {f"{name}_{of}": tensor.stride(at) for at, of in enumerate("bnh")}
    arguments = {"x": x_BNhD, "cos": cos_BND, "sin": sin_BND, "out": out_BNhD} | sizes
    arguments |= {"HALF": D // 2, "F": F, "R": R, "HEADS": near, "SIGNED": signed, "BACK": back}
    grid = (B * triton.cdiv(N, R // near) * triton.cdiv(h, near),)
    return Launch(rotary_kernel, grid, arguments, 4)
