"""A frozen target whose blocks hold 8- or 4-bit weights. The quantised model is the target, in training and in measurement.

Only weights are quantised, and they are widened for each product. So a row's result does not depend on the rest of its batch,
as exact decoding requires. Embedding, norms and head keep their dtype. Shapes: I in, O out.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.ops.quantised import BITS, Quantised
from drafttrain.targets.fingerprint import fingerprint_of
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.structure import find_blocks, shape_of


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


class QuantisedTarget(HFTarget):
    """As HFTarget. `fingerprint` is that of the original weights, a dash, and the name of the quantisation."""

    def __init__(self, model: PreTrainedModel, kind: str, device: torch.device, stop_ids: frozenset[int] = frozenset()) -> None:
        self.kind, self._whole = kind, fingerprint_of(model)
        model.requires_grad_(False).eval()
        quantise_blocks(model, BITS[kind], device)
        super().__init__(model.to(device), stop_ids)  # type: ignore[arg-type]

    def _fingerprint(self) -> str:
        return f"{self._whole}-{self.kind}"

    def pruned(self, blocks: int) -> NoReturn:
        self._refuse("copies whole blocks of the target")

    def shallow(self, blocks: int) -> NoReturn:
        self._refuse("runs the target's first blocks")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"this drafter {what}, whose weights target.weights={self.kind} has quantised; choose a family with its own "
            "layers, or leave target.weights out"
        )


@torch.no_grad()
def quantise_blocks(model: Any, bits: int, device: torch.device) -> None:
    """Replace the blocks' linear maps one at a time, so that the device never holds all original weights.

    Raises UserError for a model without linear maps in its blocks.
    """
    blocks = find_blocks(model, shape_of(model.config.get_text_config()).blocks)
    found = [
        (parent, name, child)
        for parent in blocks.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    if not found:
        raise UserError(f"target.weights quantises linear maps, {type(model).__name__} has none in its blocks; leave it out")
    for parent, name, linear in found:
        setattr(parent, name, QuantisedLinear(linear, bits, device))


def whole_fingerprint(fingerprint: str) -> str:
    """The fingerprint of the weights before quantisation."""
    return fingerprint.partition("-")[0]


def weights_of(fingerprint: str) -> str:
    """The quantisation that a fingerprint names, or `whole`."""
    return fingerprint.partition("-")[2] or "whole"
