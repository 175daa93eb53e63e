"""Products with a frozen weight in oneDNN's packed order.

A CPU library packs a weight again for every product of few rows, which costs as much as the product itself. So a frozen
float32 weight is packed once, in addition to the original. Shapes: I in, O out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

PACKED_FOR = 16  # rows that a weight is packed for


def pack(weight_OI: Tensor) -> Tensor | None:
    """The weight in oneDNN's order; None on another device, for another dtype or without oneDNN."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), PACKED_FOR)
    return packed


def linear(x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """x W^T + b. With `packed` the product reads the packed weight and has no gradient."""
    if packed is None or x_I.requires_grad:
        return F.linear(x_I, weight_OI, bias_O)
    out_O: Tensor = torch.ops.mkldnn._linear_pointwise(x_I, packed, bias_O, "none", [], "")
    return out_O
