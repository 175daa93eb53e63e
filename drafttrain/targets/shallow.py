"""The first blocks of a target as a model over the same weights, and the norm that stands before its head."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.targets.structure import find_blocks


def shadow(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules whose parameters are new objects over the same memory; tied ones stay tied."""
    memo: dict[int, Tensor] = {id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo | {id(b): b for b in model.buffers()})


def cut(model: PreTrainedModel, blocks: int, first: int) -> PreTrainedModel:
    """Other modules over the same memory: the first of so many blocks, with embedding, norm and head."""
    made = shadow(model)
    text = made.config.get_text_config()
    text.num_hidden_layers = first
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:first]
    del find_blocks(made, blocks)[first:]
    return made.eval()


def final_norm(model: PreTrainedModel, blocks: int) -> nn.Module:
    """The last norm outside the blocks. Raises UserError for a model that has none."""
    inside = {id(module) for module in find_blocks(model, blocks).modules()}
    found = [m for m in model.modules() if id(m) not in inside and "norm" in type(m).__name__.lower()]
    if not found:
        raise UserError(f"{type(model).__name__} has no norm before its head, which this drafter shares; choose another family")
    return found[-1]


def check_first(blocks: int, first: int) -> None:
    """Raise UserError unless a target of so many blocks has so many first ones, and others behind them."""
    if not 1 <= first < blocks:
        raise UserError(f"drafter.blocks is {first}; the target has {blocks}, choose 1..{blocks - 1}")
