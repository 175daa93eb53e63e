"""Rotary positions (Su et al. 2021): the halves of each head's vector rotated by its position's angles, with gradients.

Shapes: B rows, N positions, h heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttrain.ops import jit, library

WIDEST = 256  # numbers of a head that the kernel takes


def rotate(x_BhND: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> Tensor:
    """[B, h, N, D]: value i of a head is paired with value i + D / 2. The angles get no gradient."""
    x_BNhD = x_BhND.transpose(1, 2)
    if not _kernels(x_BNhD, cos_BND, sin_BND):
        return reference(x_BhND, cos_BND, sin_BND)
    return _rotated(x_BNhD, cos_BND, sin_BND, False).transpose(1, 2)


def rotate_signed(x_BNhD: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> Tensor:
    """[B, N, h, D]: as `rotate`, where the first half of each sine is negated."""
    if not _kernels(x_BNhD, cos_BND, sin_BND):
        return reference_signed(x_BNhD, cos_BND, sin_BND)
    return _rotated(x_BNhD, cos_BND, sin_BND, True)


def reference(x_BhND: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> Tensor:
    """The plain-torch twin of `rotate`."""
    first, second = x_BhND.chunk(2, -1)
    return x_BhND * cos_BND[:, None] + torch.cat([-second, first], -1) * sin_BND[:, None]


def reference_signed(x_BNhD: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> Tensor:
    """The plain-torch twin of `rotate_signed`."""
    return torch.addcmul(x_BNhD * cos_BND[:, :, None], x_BNhD.roll(x_BNhD.shape[-1] // 2, -1), sin_BND[:, :, None])


def _rotated(x_BNhD: Tensor, cos_BND: Tensor, sin_BND: Tensor, signed: bool) -> Tensor:
    shape = x_BNhD.shape[0], x_BNhD.shape[1], x_BNhD.shape[3]
    out_BNhD: Tensor = _Rotate.apply(x_BNhD, cos_BND.expand(shape), sin_BND.expand(shape), signed, False)  # type: ignore[no-untyped-call]
    return out_BNhD


class _Rotate(torch.autograd.Function):
    """One kernel each way. Only the angles are kept for the backward pass.

    The result lies in memory as [B, N, h, D]: torch's attention gives its output the queries' order, which the output
    projection then reads without a copy. So does the gradient, for the projections before.
    """

    @staticmethod
    def forward(ctx: Any, x_BNhD: Tensor, cos_BND: Tensor, sin_BND: Tensor, signed: bool, back: bool) -> Tensor:
        from drafttrain.kernels.triton import rotary

        ctx.save_for_backward(cos_BND, sin_BND)
        ctx.signed, ctx.back = signed, back
        out_BNhD = x_BNhD.new_empty(x_BNhD.shape)
        rotary.launch(x_BNhD, cos_BND, sin_BND, out_BNhD, signed, back).run()
        return out_BNhD

    @staticmethod
    def backward(ctx: Any, grad_BNhD: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos_BND, sin_BND = ctx.saved_tensors
        grad_BNhD = grad_BNhD if grad_BNhD.stride(-1) == 1 else grad_BNhD.contiguous()
        to_x_BNhD: Tensor = _Rotate.apply(grad_BNhD, cos_BND, sin_BND, ctx.signed, not ctx.back)  # type: ignore[no-untyped-call]
        return to_x_BNhD, None, None, None, None


def _kernels(x_BNhD: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> bool:
    if torch.compiler.is_compiling():  # the compiler fuses the operators itself, and cannot look into our kernels
        return False
    inputs, width = (x_BNhD, cos_BND, sin_BND), x_BNhD.shape[-1]
    same_layout = all(x.dtype == x_BNhD.dtype and x.stride(-1) == 1 for x in inputs) and cos_BND.stride() == sin_BND.stride()
    supported_width = width % 2 == 0 and 0 < width <= WIDEST and bool(x_BNhD.numel())
    return same_layout and supported_width and x_BNhD.dtype in library.DTYPES and jit.serves(x_BNhD)
