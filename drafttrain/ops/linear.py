"""Products with a frozen weight, each by the library that is fastest for its rows.

A CPU library packs a weight again for every product of few rows, which costs as much as the product itself. So a frozen
weight is packed once, in oneDNN's order, in addition to the original: in float32, and in bfloat16 where the processor
multiplies it (elsewhere oneDNN widens it in every product, which is slower than float32). On a GPU, cuBLAS chooses worse
kernels than cuBLASLt for the rows of a draft tree. Shapes: I in, O out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

PACKED_FOR = 16  # rows that a weight is packed for
PACKED_ROWS = 64  # rows up to which the packed product is faster
PACKED_FROM = 1 << 17  # elements from which packing a weight pays
# rows from which cuBLASLt serves: on an H200 it took 0.95 times as long as cuBLAS for the weights of a block of Llama-3.1-8B
# with 64 rows, and 1.02 times with 16
LT_ROWS = range(33, 257)


def pack(weight_OI: Tensor) -> Tensor | None:
    """The weight in oneDNN's order; None on another device, for a dtype that the processor lacks, or without oneDNN."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype not in packed_dtypes():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), PACKED_FOR)
    return packed


def packed_dtypes() -> tuple[torch.dtype, ...]:
    """The formats in which this processor multiplies, in oneDNN's order."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ()
    bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return (torch.float32, torch.bfloat16) if bfloat16 else (torch.float32,)


def linear(x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """x W^T + b. With `packed` the product reads the packed weight and has no gradient."""
    if packed is not None and not x_I.requires_grad:
        out_O: Tensor = torch.ops.mkldnn._linear_pointwise(x_I, packed, bias_O, "none", [], "")
        return out_O
    if x_I.is_cuda and x_I.numel() // x_I.shape[-1] in LT_ROWS and _has_lt():
        with _cublaslt():
            return F.linear(x_I, weight_OI, bias_O)
    return F.linear(x_I, weight_OI, bias_O)


@contextmanager
def _cublaslt() -> Iterator[None]:
    """Meanwhile torch calls cuBLASLt."""
    previous_library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(previous_library)


@cache
def _has_lt() -> bool:
    """Whether this torch was built with cuBLASLt."""
    try:
        with _cublaslt():
            return True
    except RuntimeError:
        return False


class Packs:
    """Packed copies of frozen weights, made at their first use by few rows and again when a weight has changed."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[object, tuple[int, int, Tensor | None]] = WeakKeyDictionary()

    def of(self, owner: object, weight_OI: Tensor, x_I: Tensor) -> Tensor | None:
        """The packed weight for the product with x; None where the plain product serves, as for a weight that is trained.

        owner: the object that the weight belongs to; its copies are kept for its lifetime. A change of a frozen weight
        through `.data` is not seen, since torch counts no version for it.
        """
        few_rows = x_I.numel() <= PACKED_ROWS * x_I.shape[-1]
        if not few_rows or weight_OI.requires_grad or weight_OI.numel() < PACKED_FROM or weight_OI.device.type != "cpu":
            return None
        if weight_OI.is_inference():  # it counts no versions
            return None
        entry = self._kept.get(owner)
        if entry is None or entry[:2] != (weight_OI._version, weight_OI.data_ptr()):
            entry = (weight_OI._version, weight_OI.data_ptr(), pack(weight_OI))
            self._kept[owner] = entry
        return entry[2]


PACKS = Packs()
