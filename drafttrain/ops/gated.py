"""The gated activation of a Llama MLP, SiLU(gate) * up, with both inputs in one tensor (Shazeer 2020, SwiGLU)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.ops import library


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
