"""Products in FP8: weights and activations in e4m3, sums in float32, as engines compute FP8 checkpoints.

A weight has one scale per output row, an activation one per row (token), found for each product (`fp8_rows`). On a GPU of
capability 8.9 torch's `_scaled_mm` computes the product, if a trial shows that it is right. Elsewhere the codes are widened for
each product, which gives the same numbers and saves no time. Shapes: I in, O out, M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.ops.fp8_rows import E4M3, fp8_rows
from drafttrain.ops.fp8_rows import reference as rows_reference

MULTIPLE = 16  # torch's product takes weights of whole multiples
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (code_MI, scale_M1, code_OI, scale_O) -> out_MO in bfloat16


class Fp8Linear(nn.Module):
    """A frozen linear map with weights in FP8."""

    def __init__(self, code_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> None:
        """scale: in float32."""
        super().__init__()
        self.code, self.scale = (nn.Parameter(part, requires_grad=False) for part in (code_OI, scale_O))
        self.bias = None if bias_O is None else nn.Parameter(bias_O, requires_grad=False)
        self.out_features, self.in_features = code_OI.shape

    @staticmethod
    def of(linear: Any, device: torch.device) -> Fp8Linear:
        """The weight of a linear map, quantised."""
        code_OI, scale_O1 = rows_reference(linear.weight.detach().to(device))
        return Fp8Linear(code_OI, scale_O1[:, 0], linear.bias)

    @staticmethod
    def joined(parts: Sequence[Fp8Linear], order_O: Tensor | None = None) -> Fp8Linear:
        """The output rows of all parts as one map. order_O: of the rows; None: as they are, and the parts become views."""
        if len(parts) == 1 and order_O is None:
            return parts[0]
        bias_O, given = None, [part.bias for part in parts if part.bias is not None]
        if given:
            zero = given[0].new_zeros
            bias_O = torch.cat([zero(part.out_features) if part.bias is None else part.bias for part in parts])
        code_OI, scale_O = (torch.cat([getattr(part, name).data for part in parts]) for name in ("code", "scale"))
        if order_O is not None:  # torch indexes few kinds of FP8 tensors
            code_OI, scale_O = code_OI.view(torch.uint8)[order_O].view(E4M3), scale_O[order_O]
            return Fp8Linear(code_OI, scale_O, None if bias_O is None else bias_O[order_O])
        start = 0
        for part in parts:
            rows = slice(start, start + part.out_features)
            part.code.data, part.scale.data, start = code_OI[rows], scale_O[rows], rows.stop
        return Fp8Linear(code_OI, scale_O, bias_O)

    def forward(self, x_I: Tensor) -> Tensor:
        """[..., O] in x's dtype."""
        assert not (x_I.requires_grad and torch.is_grad_enabled()), "products in FP8 have no gradient"
        x_MI = x_I.reshape(-1, self.in_features)
        way = _way(x_MI, self.code)
        code_MI, scale_M1 = fp8_rows(x_MI)
        if way is None:
            out_MO = reference(code_MI, scale_M1, self.code, self.scale).to(x_I.dtype)
        else:
            out_MO = way(code_MI, scale_M1, self.code, self.scale)
        out_O = out_MO.view(*x_I.shape[:-1], self.out_features)
        return out_O if self.bias is None else out_O + self.bias


def reference(code_MI: Tensor, scale_M1: Tensor, code_OI: Tensor, scale_O: Tensor) -> Tensor:
    """The plain-torch twin of the ways, in float32: the codes are widened."""
    return code_MI.float() @ code_OI.float().T * scale_M1 * scale_O


def why_widened(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products of activations of this dtype widen the codes, which saves no time; None: torch's product serves."""
    if device.type != "cuda":
        return f"torch's FP8 product runs on GPUs, this is a {device.type}"
    if dtype != torch.bfloat16:
        return f"torch's FP8 product gives bfloat16, not {str(dtype).removeprefix('torch.')}"
    faults = [fault(way, device) for way in WAYS]
    return faults[0] if all(faults) else None


def _by_rows(code_MI: Tensor, scale_M1: Tensor, code_OI: Tensor, scale_O: Tensor) -> Tensor:
    return torch._scaled_mm(code_MI, code_OI.T, scale_M1, scale_O[None], out_dtype=torch.bfloat16)


def _afterwards(code_MI: Tensor, scale_M1: Tensor, code_OI: Tensor, scale_O: Tensor) -> Tensor:
    one = torch.ones((), device=code_MI.device)
    out_MO = torch._scaled_mm(code_MI, code_OI.T, one, one, out_dtype=torch.float32)
    return (out_MO * scale_M1 * scale_O).bfloat16()


WAYS: tuple[Way, ...] = (_by_rows, _afterwards)  # the best first


def _way(x_MI: Tensor, code_OI: Tensor) -> Way | None:
    """The product that serves here; None: only the twin."""
    fits = x_MI.dtype == torch.bfloat16 and len(x_MI) and all(size % MULTIPLE == 0 for size in code_OI.shape)
    if not fits or _kind(x_MI) != "cuda" or torch.compiler.is_compiling():
        return None
    return next((way for way in WAYS if fault(way, x_MI.device) is None), None)


def _kind(x: Tensor) -> str:
    return x.device.type


@cache
def fault(way: Way, device: torch.device) -> str | None:
    """Why this product cannot be used on this GPU; None if it is right. Tried once."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "an FP8 product needs a GPU of capability 8.9"
    generator = torch.Generator().manual_seed(0)
    code_OI, scale_O1 = rows_reference(torch.randn(96, 272, generator=generator))
    worst = 0.0
    for rows in (1, 5, 80):
        code_MI, scale_M1 = rows_reference(torch.randn(rows, 272, generator=generator))
        wanted_MO = (code_MI.double() * scale_M1) @ (code_OI.double() * scale_O1).T
        given = [x.to(device) for x in (code_MI, scale_M1, code_OI, scale_O1[:, 0])]
        try:
            found_MO = way(*given).double().cpu()
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            return str(error).strip().partition("\n")[0][:160] or "it failed without a message"
        gap = float((found_MO - wanted_MO).norm() / wanted_MO.norm())
        worst = max(worst, gap if gap == gap else torch.inf)
    return None if worst < 1e-2 else f"its products are off by {worst:.1e} of their norm"
