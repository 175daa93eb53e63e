"""The gated activation of a Llama MLP, SiLU(gate) * up, with both inputs in one tensor (Shazeer 2020, SwiGLU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.ops import jit, library


def gated(gate_up_I: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """[..., 2 I] -> [..., I]. The gate is the first half. activation: of the gate, in place of SiLU; torch computes it."""
    if activation is not None:
        gate_I, up_I = gate_up_I.chunk(2, -1)
        return activation(gate_I) * up_I
    if not (library.serves(gate_up_I) and gate_up_I.is_contiguous()):
        return reference(gate_up_I)
    out_I = gate_up_I.new_empty(*gate_up_I.shape[:-1], gate_up_I.shape[-1] // 2)
    torch.ops.drafttrain.gated(gate_up_I, out_I)
    return out_I


def reference(gate_up_I: Tensor) -> Tensor:
    """The plain-torch twin of `gated`."""
    gate_I, up_I = gate_up_I.chunk(2, -1)
    return F.silu(gate_I) * up_I


def gate(gate_I: Tensor, up_I: Tensor) -> Tensor:
    """SiLU(gate) * up with gradients, in training. Only the inputs are kept for the backward pass."""
    if torch.compiler.is_compiling():  # the compiler fuses the operators itself, and cannot look into our kernels
        return F.silu(gate_I) * up_I
    out_I: Tensor = _Gate.apply(gate_I, up_I)  # type: ignore[no-untyped-call]
    return out_I


class _Gate(torch.autograd.Function):
    """On a GPU one kernel each way; elsewhere torch's operators, whose results it has bit for bit."""

    @staticmethod
    def forward(ctx: Any, gate_I: Tensor, up_I: Tensor) -> Tensor:
        ctx.save_for_backward(gate_I, up_I)
        if not _kernels(gate_I, up_I):
            return F.silu(gate_I).mul_(up_I)
        from drafttrain.kernels.triton import layer

        out_I = torch.empty_like(gate_I)
        layer.gate(gate_I, up_I, out_I).run()
        return out_I

    @staticmethod
    def backward(ctx: Any, grad_I: Tensor) -> tuple[Tensor, Tensor]:
        gate_I, up_I = ctx.saved_tensors
        if not _kernels(gate_I, up_I, grad_I):
            to_gate_I: Tensor = torch.ops.aten.silu_backward(grad_I * up_I, gate_I)
            return to_gate_I, F.silu(gate_I).mul_(grad_I)
        from drafttrain.kernels.triton import layer

        to_gate_I, to_up_I = torch.empty_like(gate_I), torch.empty_like(up_I)
        layer.gate_backward(grad_I, gate_I, up_I, to_gate_I, to_up_I).run()
        return to_gate_I, to_up_I


def _kernels(*inputs: Tensor) -> bool:
    same_layout = all(x.dtype in library.DTYPES and x.is_contiguous() and x.dtype == inputs[0].dtype for x in inputs)
    return same_layout and bool(inputs[0].numel()) and jit.serves(inputs[0])
