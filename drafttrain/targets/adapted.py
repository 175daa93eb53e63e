"""Low-rank adapters (peft's) at decoding: products with one merged weight, while the parameters stay apart."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def merged(linear: Any) -> Tensor:
    """A linear map's weight, with its adapter's product if it has one."""
    weight: Tensor = linear.weight.detach()
    delta = getattr(linear, "get_delta_weight", None)
    return weight if delta is None else weight + delta("default").to(weight.dtype)


def substitute(model: nn.Module) -> None:
    """Adapted layers compute with merged copies of their weights until `restore`; what they hold stays as it is."""
    for layer in _adapted(model):
        copied = copy.deepcopy(layer.base_layer)
        copied.weight = nn.Parameter(merged(layer), requires_grad=False)
        layer.forward = copied.forward  # of this instance alone


def restore(model: nn.Module) -> None:
    for layer in _adapted(model):
        layer.__dict__.pop("forward", None)


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "get_delta_weight")]
