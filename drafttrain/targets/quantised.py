"""Models whose blocks hold FP8, 8- or 4-bit weights. The quantised model is the target, in training and in measurement.

int8 and int4 quantise weights alone, which are widened for each product. FP8 quantises activations too, token by token
(`ops.fp8`). So a row's result never depends on the rest of its batch, as exact decoding requires. Embedding, norms and head
keep their dtype. Shapes: I in, O out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.ops.fp8 import Fp8Linear, why_widened
from drafttrain.ops.fp8_rows import E4M3
from drafttrain.ops.quantised import BITS, Quantised, stored_bytes
from drafttrain.targets.fingerprint import fingerprint_of
from drafttrain.targets.structure import find_blocks, shape_of

FP8 = "fp8"
KINDS = (FP8, *BITS)  # of weights


class QuantisedLinear(nn.Module):
    """A linear map with quantised weights."""

    def __init__(self, linear: nn.Linear, bits: int, device: torch.device) -> None:
        super().__init__()
        product = Quantised(linear.weight.to(device), bits, packed=False)
        product.code = self.code = nn.Parameter(product.code, requires_grad=False)
        product.scale = self.scale = nn.Parameter(product.scale, requires_grad=False)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product = product

    def forward(self, x_I: Tensor) -> Tensor:
        return F.linear(x_I, self._product.widened(x_I.dtype), self.bias)


@torch.no_grad()
def quantise(model: Any, kind: str, device: torch.device) -> str:
    """Replace the blocks' linear maps one at a time, so that the device never holds all original weights.

    Returns the quantised model's fingerprint: that of the original weights, a dash, and the kind. Raises UserError for a model
    without linear maps in its blocks.
    """
    if is_quantised(model):
        raise UserError(f"target.weights is {kind}, but the checkpoint's weights are in FP8 already; set target.weights=null")
    original_fingerprint = fingerprint_of(model)
    model.requires_grad_(False).eval()
    blocks = find_blocks(model, shape_of(model.config.get_text_config()).blocks)
    linears = [
        (parent, name, child)
        for parent in blocks.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    if not linears:
        raise UserError(f"target.weights quantises linear maps, {type(model).__name__} has none in its blocks; leave it out")
    for parent, name, linear in linears:
        quantised_linear = Fp8Linear.of(linear, device) if kind == FP8 else QuantisedLinear(linear, BITS[kind], device)
        setattr(parent, name, quantised_linear)
    return f"{original_fingerprint}-{kind}"


def weight_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Bytes of a quantised weight with its scales."""
    return outputs * (inputs + 4) if kind == FP8 else stored_bytes(outputs, inputs, BITS[kind])


def why_slow(model: Any) -> str | None:
    """Why the model's quantised weights save memory and no time; None: they save time, or are whole."""
    if any(isinstance(module, QuantisedLinear) for module in model.modules()):
        return "weights are widened for each product"
    fp8_linears = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    fault = why_widened(model.device, model.dtype, any(linear.blocks for linear in fp8_linears)) if fp8_linears else None
    return fault and f"weights are widened for each product ({fault})"


def rounded_to(target: Any) -> torch.dtype:
    """The dtype whose rounding changes a target's logits most: e4m3 where activations are quantised to it."""
    fp8 = any(isinstance(module, Fp8Linear) for module in target.model.modules())
    dtype: torch.dtype = E4M3 if fp8 else target.dtype
    return dtype


def is_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, QuantisedLinear | Fp8Linear) for module in model.modules())


def check_whole(model: nn.Module, what: str) -> None:
    """Raise UserError for a model with quantised weights. what: a drafter does that needs whole ones."""
    if is_quantised(model):
        raise UserError(
            f"this drafter {what}, whose weights are quantised; choose a family with its own layers, or leave target.weights "
            "out"
        )


def whole_fingerprint(fingerprint: str) -> str:
    """The fingerprint of the weights before quantisation."""
    return fingerprint.partition("-")[0]


def weights_of(fingerprint: str) -> str:
    """The quantisation that a fingerprint names, or `whole`."""
    return fingerprint.partition("-")[2] or "whole"
