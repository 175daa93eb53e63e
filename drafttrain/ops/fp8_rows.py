"""Rows in FP8 (e4m3), with one scale for each or for each group of its numbers, as engines quantise activations per token.

Shapes: M rows, I numbers of a row, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import jit, library

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
WIDEST = 32_768  # numbers of a row that one program of the kernel holds


def fp8_rows(x_MI: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """(codes [M, I] in e4m3, scales [M, G] in float32), which stand for code * scale. One kernel on a GPU.

    A scale is the group's largest magnitude / 448, and 1 for a group of zeros. One group's scales follow one another in memory.
    """
    if not _kernels(x_MI):
        return reference(x_MI, groups)
    from drafttrain.kernels.triton import fp8

    code_MI = x_MI.new_empty(x_MI.shape, dtype=E4M3)
    scale_GM = x_MI.new_empty(groups, len(x_MI), dtype=torch.float32)
    fp8.rows(x_MI.contiguous(), code_MI, scale_GM.T, LARGEST).run()
    return code_MI, scale_GM.T


def reference(x_MI: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """The plain-torch twin of `fp8_rows`, with the same codes."""
    x_MGI = x_MI.float().view(len(x_MI), groups, x_MI.shape[1] // groups)
    amax_MG1 = x_MGI.abs().amax(-1, keepdim=True)
    # by a tensor: on a GPU torch multiplies by the inverse of a number, which rounds otherwise
    scale_MG1 = torch.where(amax_MG1 > 0, amax_MG1 / torch.full_like(amax_MG1, LARGEST), 1.0)
    return (x_MGI / scale_MG1).to(E4M3).flatten(-2), scale_MG1[..., 0].T.contiguous().T


def _kernels(x_MI: Tensor) -> bool:
    if torch.compiler.is_compiling():  # the compiler fuses the operators itself, and cannot look into our kernels
        return False
    return bool(x_MI.numel()) and x_MI.shape[-1] <= WIDEST and x_MI.dtype in library.DTYPES and jit.serves(x_MI)
