"""Replaces weights for decoding, by merged low-rank adapters (peft's) or by quantised copies. The parameters stay unchanged."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.model.joint import merged
from drafttrain.ops.quantised import Quantised


class QuantisedForward:
    """A linear map's forward with quantised weights."""

    def __init__(self, layer: Any, base: nn.Linear, bits: int) -> None:
        self.bits, self.bias, self.product = bits, base.bias, Quantised(merged(layer), bits)

    def take(self, layer: Any) -> None:
        self.product.take(Quantised(merged(layer), self.bits))

    def __call__(self, x_I: Tensor) -> Tensor:
        return self.product(x_I) if self.bias is None else self.product(x_I) + self.bias


class MergedForward:
    """An adapted layer's forward with merged weights."""

    def __init__(self, layer: Any, base: nn.Module) -> None:
        self.copied: Any = copy.deepcopy(base)
        self.copied.weight = nn.Parameter(merged(layer), requires_grad=False)

    def take(self, layer: Any) -> None:
        self.copied.weight.copy_(merged(layer))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.copied(*args, **kwargs)


@torch.no_grad()
def substitute(model: nn.Module, bits: int | None = None) -> None:
    """Until `restore`, adapted layers compute with merged weights and, with `bits`, all linear maps with quantised ones.

    The parameters do not change. A later call writes the current weights to the same memory: captured steps refer to it.
    """
    with torch.inference_mode(False):
        for layer in _layers(model):
            base = getattr(layer, "base_layer", layer)
            quantises = bits is not None and isinstance(base, nn.Linear)
            if base is layer and not quantises:
                continue
            installed = layer.__dict__.get("forward")
            if (
                isinstance(installed, QuantisedForward if quantises else MergedForward)
                and getattr(installed, "bits", bits) == bits
            ):
                installed.take(layer)
            else:
                layer.forward = QuantisedForward(layer, base, bits or 0) if quantises else MergedForward(layer, base)


def restore(model: nn.Module) -> None:
    """Undo `substitute`."""
    for layer in _layers(model):
        layer.__dict__.pop("forward", None)


def _layers(model: nn.Module) -> list[Any]:
    """Linear maps; one with an adapter counts as a single layer."""
    layers, adapted = [], ""
    for name, module in model.named_modules():
        if adapted and name.startswith(adapted):
            continue
        if hasattr(module, "get_delta_weight"):
            adapted = f"{name}."
        if adapted == f"{name}." or isinstance(module, nn.Linear):
            layers.append(module)
    return layers
