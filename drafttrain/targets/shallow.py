"""The first blocks of a target as a model over the same weights, and the norm before its head."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.targets.quantised import check_whole
from drafttrain.targets.structure import find_blocks, set_depth

HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)

OF_HOOKS = ("forward", "_output_capturing_hooks_installed")  # the second is transformers' note that it has hooks


def weight_sharing_copy(model: PreTrainedModel, hooks: bool = True) -> PreTrainedModel:
    """A copy of the modules whose parameters are new objects over the same memory. Tied parameters stay tied.

    hooks: whether the copy has the modules' hooks, and forward methods that were replaced in single modules.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()}
    if not hooks:
        memo |= {id(getattr(module, name)): OrderedDict() for module in model.modules() for name in HOOKS}
    copied = copy.deepcopy(model, memo | {id(b): b for b in model.buffers()})
    for module in () if hooks else copied.modules():
        for name in OF_HOOKS:
            module.__dict__.pop(name, None)
    return copied


def narrowed(weights: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights of a deeper model as a `model` of its first blocks has them, views of the same memory.

    Some weights pack the parts of all blocks in one matrix, in order (Gemma-4's and Gemma-3n's per-layer embeddings): the
    first rows or columns are kept.
    """
    found = dict(weights)
    for name, own in model.state_dict().items():
        for dim, size in enumerate(own.shape if name in found else ()):
            found[name] = found[name].narrow(dim, 0, size)
    return found


def first_blocks(model: PreTrainedModel, blocks: int, first: int) -> PreTrainedModel:
    """A model of the `first` blocks over the same memory, with embedding, norm and head. blocks: the number of all blocks."""
    copied = weight_sharing_copy(model)
    set_depth(copied.config, first)
    del find_blocks(copied, blocks)[first:]
    with torch.device("meta"):
        outline = type(copied)(copied.config)
    weights = narrowed(copied.state_dict(), outline)
    for name, weight in copied.named_parameters():
        weight.data = weights[name]
    return copied.eval()


def final_norm(model: PreTrainedModel, blocks: int) -> nn.Module:
    """The last norm outside the blocks. Raises UserError for a model without one."""
    inside = {id(module) for module in find_blocks(model, blocks).modules()}
    found = [m for m in model.modules() if id(m) not in inside and "norm" in type(m).__name__.lower()]
    hidden = model.config.get_text_config().hidden_size  # Gemma-4 has a norm of narrower per-layer embeddings too
    found = [m for m in found if all(p.shape == (hidden,) for p in m.parameters())]
    if not found:
        raise UserError(f"{type(model).__name__} has no norm before its head, which this drafter shares; choose another family")
    return found[-1]


def check_first(model: nn.Module, blocks: int, first: int) -> None:
    """Raise UserError unless `first` blocks are some but not all of a target's `blocks`, with whole weights."""
    check_whole(model, "runs the target's first blocks")
    if not 1 <= first < blocks:
        raise UserError(f"drafter.blocks is {first}; the target has {blocks}, choose 1..{blocks - 1}")
