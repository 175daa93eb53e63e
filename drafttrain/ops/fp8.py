"""Products in FP8: weights and activations in e4m3, sums in float32, as engines compute FP8 checkpoints.

Either a weight has one scale per output row and an activation one per row (token), or a weight has one per block of 128 x 128
and an activation one per row and group of 128 inputs (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Scales of activations are
found for each product (`fp8_rows`). On a GPU of capability 8.9 torch's `_scaled_mm` computes the product, if a trial shows that
it is right. Elsewhere the codes are widened for each product, which gives the same numbers and saves no time.

Shapes: I in, O out, M rows, G groups of a row, P x Q blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.ops.fp8_rows import E4M3, fp8_rows
from drafttrain.ops.fp8_rows import reference as rows_reference

MULTIPLE = 16  # torch's product takes weights of whole multiples
BLOCK = 128
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (code_MI, scale_MG, code_OI, its scales) -> out_MO in bfloat16


_WHOLE = ContextVar("whole activations", default=False)


@contextmanager
def whole_activations() -> Iterator[None]:
    """Meanwhile activations are not quantised: the least rounding before a product can change one by a step of its codes, so
    that outputs of equal passes are far apart."""
    reset_token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(reset_token)


class Fp8Linear(nn.Module):
    """A frozen linear map with weights in FP8."""

    def __init__(self, code_OI: Tensor, scale: Tensor, bias_O: Tensor | None = None) -> None:
        """scale: in float32, [O] of rows or [O / 128, I / 128] of blocks."""
        super().__init__()
        self.code, self.scale = (nn.Parameter(tensor, requires_grad=False) for tensor in (code_OI, scale))
        self.bias = None if bias_O is None else nn.Parameter(bias_O, requires_grad=False)
        self.out_features, self.in_features = code_OI.shape
        self.blocks = scale.ndim == 2
        self.groups = scale.shape[1] if self.blocks else 1  # scales of a row of activations

    @staticmethod
    def of(linear: Any, device: torch.device) -> Fp8Linear:
        """The weight of a linear map, quantised by rows."""
        code_OI, scale_O1 = rows_reference(linear.weight.detach().to(device))
        return Fp8Linear(code_OI, scale_O1[:, 0], linear.bias)

    @staticmethod
    def joined(parts: Sequence[Fp8Linear], order_O: Tensor | None = None) -> Fp8Linear:
        """The output rows of all parts as one map. order_O: of the rows; None: as they are, and the parts become views."""
        if len(parts) == 1 and order_O is None:
            return parts[0]
        bias_O, biases = None, [linear.bias for linear in parts if linear.bias is not None]
        if biases:
            zero = biases[0].new_zeros
            bias_O = torch.cat([zero(linear.out_features) if linear.bias is None else linear.bias for linear in parts])
        code_OI, scale = (torch.cat([getattr(linear, name).data for linear in parts]) for name in ("code", "scale"))
        if order_O is not None:  # torch indexes few kinds of FP8 tensors
            assert scale.ndim == 1, "rows of a block share their scales"
            code_OI, scale = code_OI.view(torch.uint8)[order_O].view(E4M3), scale[order_O]
            return Fp8Linear(code_OI, scale, None if bias_O is None else bias_O[order_O])
        for name, joined_tensor in (("code", code_OI), ("scale", scale)):
            for linear, rows in zip(
                parts, torch.split(joined_tensor, [len(getattr(linear, name)) for linear in parts]), strict=True
            ):
                getattr(linear, name).data = rows
        return Fp8Linear(code_OI, scale, bias_O)

    def values(self, place_S: Tensor) -> Tensor:
        """[S] in float32: what these places of the flat weight stand for."""
        place_S = place_S.to(self.code.device)
        row_S, column_S = place_S // self.in_features, place_S % self.in_features
        scale_S = self.scale[row_S // BLOCK, column_S // BLOCK] if self.blocks else self.scale[row_S]
        return self.code.view(torch.uint8).flatten()[place_S].view(E4M3).float() * scale_S

    def forward(self, x_I: Tensor) -> Tensor:
        """[..., O] in x's dtype."""
        assert not (x_I.requires_grad and torch.is_grad_enabled()), "products in FP8 have no gradient"
        x_MI = x_I.reshape(-1, self.in_features)
        product = _way(x_MI, self)
        code_MI, scale_MG = fp8_rows(x_MI, self.groups)
        if _WHOLE.get():
            out_MO = F.linear(x_MI, widened(self.code, self.scale).to(x_MI.dtype))
        elif product is None:
            out_MO = reference(code_MI, scale_MG, self.code, self.scale).to(x_I.dtype)
        else:
            out_MO = product(code_MI, scale_MG, self.code, self.scale)
        out_O = out_MO.view(*x_I.shape[:-1], self.out_features)
        return out_O if self.bias is None else out_O + self.bias


def reference(code_MI: Tensor, scale_MG: Tensor, code_OI: Tensor, scale: Tensor) -> Tensor:
    """The plain-torch twin of the ways, in float32: the codes are widened."""
    return widened(code_MI, scale_MG) @ widened(code_OI, scale).T


def widened(code_MI: Tensor, scale: Tensor) -> Tensor:
    """[M, I] in float32: the values of the codes, with scales [M] of rows, [M, G] of their groups, or [P, Q] of blocks."""
    scale_PQ = scale if scale.ndim == 2 else scale[:, None]
    if scale_PQ.numel() == 0:
        return code_MI.float()
    rows, columns = code_MI.shape[0] // scale_PQ.shape[0], code_MI.shape[1] // scale_PQ.shape[1]
    blocks = code_MI.float().view(len(scale_PQ), rows, -1, columns)
    return (blocks * scale_PQ[:, None, :, None]).view(code_MI.shape)


def why_widened(device: torch.device, dtype: torch.dtype, blocks: bool = False) -> str | None:
    """Why products of activations of this dtype widen the codes, which saves no time; None: torch's product serves."""
    if device.type != "cuda":
        return f"torch's FP8 product runs on GPUs, this is a {device.type}"
    if dtype != torch.bfloat16:
        return f"torch's FP8 product gives bfloat16, not {str(dtype).removeprefix('torch.')}"
    reasons = [fault(product, device) for product in (BLOCK_WAYS if blocks else WAYS)]
    return reasons[0] if all(reasons) else None


def _by_rows(code_MI: Tensor, scale_M1: Tensor, code_OI: Tensor, scale_O: Tensor) -> Tensor:
    return torch._scaled_mm(code_MI, code_OI.T, scale_M1.view(-1)[:, None], scale_O[None], out_dtype=torch.bfloat16)


def _afterwards(code_MI: Tensor, scale_M1: Tensor, code_OI: Tensor, scale_O: Tensor) -> Tensor:
    unit_scale = torch.ones((), device=code_MI.device)
    out_MO = torch._scaled_mm(code_MI, code_OI.T, unit_scale, unit_scale, out_dtype=torch.float32)
    return (out_MO * scale_M1 * scale_O).bfloat16()


def _by_blocks(code_MI: Tensor, scale_MG: Tensor, code_OI: Tensor, scale_PQ: Tensor) -> Tensor:
    return torch._scaled_mm(code_MI, code_OI.T, scale_MG, scale_PQ.T, out_dtype=torch.bfloat16)


def _by_padded_blocks(code_MI: Tensor, scale_MG: Tensor, code_OI: Tensor, scale_PQ: Tensor) -> Tensor:
    """With further rows of zeros, in case that cuBLAS wants whole vectors of scales."""
    missing = -len(code_MI) % MULTIPLE
    padded_MI = F.pad(code_MI.view(torch.uint8), (0, 0, 0, missing)).view(E4M3)
    return _by_blocks(padded_MI, F.pad(scale_MG.T, (0, missing)).T, code_OI, scale_PQ)[: len(code_MI)]


WAYS: tuple[Way, ...] = (_by_rows, _afterwards)  # the best first
BLOCK_WAYS: tuple[Way, ...] = (_by_blocks, _by_padded_blocks)


def _way(x_MI: Tensor, linear: Fp8Linear) -> Way | None:
    """The product that serves here; None: only the twin."""
    supported = x_MI.dtype == torch.bfloat16 and len(x_MI) and all(size % MULTIPLE == 0 for size in linear.code.shape)
    if linear.blocks:
        supported = supported and linear.groups % 4 == 0  # cuBLAS reads a block row's scales four at a time
    if not supported or _kind(x_MI) != "cuda" or torch.compiler.is_compiling():
        return None
    products = BLOCK_WAYS if linear.blocks else WAYS
    return next((product for product in products if fault(product, x_MI.device) is None), None)


def _kind(x: Tensor) -> str:
    return x.device.type


@cache
def fault(way: Way, device: torch.device) -> str | None:
    """Why this product cannot be used on this GPU; None if it is right. Tried once."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "an FP8 product needs a GPU of capability 8.9"
    generator, worst, blocks = torch.Generator().manual_seed(0), 0.0, way in BLOCK_WAYS
    code_OI, scale = rows_reference(torch.randn(2 * BLOCK, 4 * BLOCK, generator=generator))
    scale = torch.rand(2, 4, generator=generator) if blocks else scale[:, 0]
    for rows in (1, 5, 80):
        code_MI, scale_MG = rows_reference(torch.randn(rows, 4 * BLOCK, generator=generator), 4 if blocks else 1)
        expected_MO = widened(code_MI, scale_MG) @ widened(code_OI, scale).T  # not the twin, which GPU checks forbid
        scale_MG = scale_MG.T.to(device).T  # in the same order in memory
        try:
            actual_MO = way(code_MI.to(device), scale_MG, code_OI.to(device), scale.to(device)).float().cpu()
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            return str(error).strip().partition("\n")[0][:160] or "it failed without a message"
        gap = float((actual_MO - expected_MO).norm() / expected_MO.norm())
        worst = max(worst, gap if gap == gap else torch.inf)
    return None if worst < 1e-2 else f"its products are off by {worst:.1e} of their norm"
