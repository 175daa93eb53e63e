"""Replaces weights for decoding, by merged low-rank adapters (peft's) or by quantised copies. The parameters stay unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from drafttrain.model.joint import merged
from drafttrain.ops.quantised import Quantised


def substitute(model: nn.Module, bits: int | None = None) -> None:
    """Until `restore`, adapted layers compute with merged weights and, with `bits`, all linear maps with quantised ones.

    The parameters do not change.
    """
    for layer in _layers(model):
        base = getattr(layer, "base_layer", layer)
        if bits is not None and isinstance(base, nn.Linear):
            layer.forward = _product(Quantised(merged(layer), bits), base.bias)  # of this instance alone
        elif base is not layer:
            copied = copy.deepcopy(base)
            copied.weight = nn.Parameter(merged(layer), requires_grad=False)
            layer.forward = copied.forward


def restore(model: nn.Module) -> None:
    """Undo `substitute`."""
    for layer in _layers(model):
        layer.__dict__.pop("forward", None)


def _product(weight: Quantised, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: weight(x) if bias is None else weight(x) + bias


def _layers(model: nn.Module) -> list[Any]:
    """Linear maps; one with an adapter counts as a single layer."""
    found, adapted = [], ""
    for name, module in model.named_modules():
        if adapted and name.startswith(adapted):
            continue
        if hasattr(module, "get_delta_weight"):
            adapted = f"{name}."
        if adapted == f"{name}." or isinstance(module, nn.Linear):
            found.append(module)
    return found
