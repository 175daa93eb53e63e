"""Rows in FP8 (e4m3), each with a scale of its own, as vLLM and compressed-tensors quantise activations per token.

Shapes: M rows, I numbers of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import jit, library

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
WIDEST = 32_768  # numbers of a row that one program of the kernel holds


def fp8_rows(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [M, I] in e4m3, scales [M, 1] in float32), which stand for code * scale. One kernel on a GPU.

    A scale is the row's largest magnitude / 448, and 1 for a row of zeros.
    """
    if not _kernels(x_MI):
        return reference(x_MI)
    from drafttrain.kernels.triton import fp8

    code_MI = x_MI.new_empty(x_MI.shape, dtype=E4M3)
    scale_M1 = x_MI.new_empty(len(x_MI), 1, dtype=torch.float32)
    fp8.rows(x_MI.contiguous(), code_MI, scale_M1, LARGEST).run()
    return code_MI, scale_M1


def reference(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """The plain-torch twin of `fp8_rows`, with the same codes."""
    x_MI = x_MI.float()
    most_M1 = x_MI.abs().amax(-1, keepdim=True)
    scale_M1 = torch.where(most_M1 > 0, most_M1 / LARGEST, 1.0)
    return (x_MI / scale_M1).to(E4M3), scale_M1


def _kernels(x_MI: Tensor) -> bool:
    if torch.compiler.is_compiling():  # the compiler fuses the operators itself, and cannot look into our kernels
        return False
    return bool(x_MI.numel()) and x_MI.shape[-1] <= WIDEST and x_MI.dtype in library.DTYPES and jit.serves(x_MI)
