"""RMS norm (Zhang & Sennrich 2019) of a residual stream, with the addition before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.ops import library


def rms_norm(x_H: Tensor, delta_H: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm times the weight), both [..., H]. Without a delta the first is x itself."""
    if not (library.serves(x_H) and x_H.is_contiguous() and weight_H.dtype == x_H.dtype):
        return reference(x_H, delta_H, weight_H, eps)
    out_H = torch.empty_like(x_H)
    summed_H = x_H if delta_H is None else torch.empty_like(x_H)
    torch.ops.drafttrain.rms_norm(x_H, None if delta_H is None else delta_H.contiguous(), weight_H, eps, summed_H, out_H)
    return summed_H, out_H


def norm(module: Any, x_H: Tensor, delta_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`rms_norm` with a transformers module's weight. A trainable module, which may be sharded, runs its own forward."""
    if module.weight.requires_grad:
        summed_H = x_H if delta_H is None else x_H + delta_H
        return summed_H, module(summed_H)
    return rms_norm(x_H, delta_H, module.weight, module.variance_epsilon)


def reference(x_H: Tensor, delta_H: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The plain-torch twin of `rms_norm`."""
    summed_H = x_H if delta_H is None else x_H + delta_H
    return summed_H, F.rms_norm(summed_H, (summed_H.shape[-1],), weight_H, eps)
