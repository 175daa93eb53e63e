"""Products with a frozen weight, each by what is fastest for its rows.

A CPU library packs a weight again for every product of few rows, which costs as much as the product itself. So a frozen
weight is packed once, in addition to the original: in float32 in oneDNN's order, in bfloat16 for an operator of our own
(oneDNN's product takes twice as long). On a GPU, cuBLAS chooses worse kernels than cuBLASLt for the rows of a draft tree.
Shapes: I in, O out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.ops import library

PACKED_FOR = 16  # rows that oneDNN packs a weight for
PANEL = 16  # outputs that lie side by side in our own order
PACKED_ROWS = 64  # rows up to which the packed product is faster
PACKED_FROM = 1 << 17  # elements from which packing a weight pays
# rows from which cuBLASLt serves: on an H200 it took 0.95 times as long as cuBLAS for the weights of a block of Llama-3.1-8B
# with 64 rows, and 1.02 times with 16
LT_ROWS = range(33, 257)


def pack(weight_OI: Tensor) -> Tensor | None:
    """The weight for products of few rows; None on another device, for another dtype, or without what multiplies it.

    In float32 in oneDNN's order; in bfloat16 in panels of 16 outputs, [panels, I / 2, 16, 2], zeros where it ends.
    """
    if weight_OI.device.type != "cpu" or weight_OI.dtype not in packed_dtypes():
        return None
    weight_OI = weight_OI.detach()
    if weight_OI.dtype == torch.float32:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACKED_FOR)
        return packed
    outputs, inputs = weight_OI.shape
    padded_OI = F.pad(weight_OI, (0, inputs % 2, 0, -outputs % PANEL))
    return padded_OI.reshape(-1, PANEL, padded_OI.shape[1] // 2, 2).transpose(1, 2).contiguous()


def packed_dtypes() -> list[torch.dtype]:
    """The formats that can be packed here."""
    kinds = {torch.float32: torch.backends.mkldnn.is_available(), torch.bfloat16: library.state().loaded}  # type: ignore[no-untyped-call]
    return [dtype for dtype, available in kinds.items() if available]


def linear(x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """x W^T + b. With `packed` the product of few rows reads the packed weight and has no gradient."""
    if packed is not None and not x_I.requires_grad:
        if packed.is_mkldnn:
            out_O: Tensor = torch.ops.mkldnn._linear_pointwise(x_I, packed, bias_O, "none", [], "")
            return out_O
        if x_I.numel() <= PACKED_ROWS * x_I.shape[-1] and x_I.dtype == packed.dtype:  # autocast has others
            out_O = x_I.new_empty(*x_I.shape[:-1], len(weight_OI))
            torch.ops.drafttrain.product(x_I.contiguous(), packed, bias_O, out_O)
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
