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
    model_copy = copy.deepcopy(model, memo | {id(b): b for b in model.buffers()})
    for module in () if hooks else model_copy.modules():
        for name in OF_HOOKS:
            module.__dict__.pop(name, None)
    return model_copy


def narrowed(weights: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights of a deeper model as a `model` of its first blocks has them, views of the same memory.

    Some weights pack the parts of all blocks in one matrix, in order (Gemma-4's and Gemma-3n's per-layer embeddings): the
    first rows or columns are kept.
    """
    narrow_weights = dict(weights)
    for name, weight in model.state_dict().items():
        for dim, size in enumerate(weight.shape if name in narrow_weights else ()):
            narrow_weights[name] = narrow_weights[name].narrow(dim, 0, size)
    return narrow_weights


def first_blocks(model: PreTrainedModel, blocks: int, first: int) -> PreTrainedModel:
    """A model of the `first` blocks over the same memory, with embedding, norm and head. blocks: the number of all blocks."""
    model_copy = weight_sharing_copy(model)
    set_depth(model_copy.config, first)
    del find_blocks(model_copy, blocks)[first:]
    with torch.device("meta"):
        outline = type(model_copy)(model_copy.config)
    weights = narrowed(model_copy.state_dict(), outline)
    for name, weight in model_copy.named_parameters():
        weight.data = weights[name]
    return model_copy.eval()


def final_norm(model: PreTrainedModel, blocks: int) -> nn.Module:
    """The last norm outside the blocks. Raises UserError for a model without one."""
    block_module_ids = {id(module) for module in find_blocks(model, blocks).modules()}
    norms = [m for m in model.modules() if id(m) not in block_module_ids and "norm" in type(m).__name__.lower()]
    hidden = model.config.get_text_config().hidden_size  # Gemma-4 has a norm of narrower per-layer embeddings too
    norms = [m for m in norms if all(p.shape == (hidden,) for p in m.parameters())]
    if not norms:
        raise UserError(f"{type(model).__name__} has no norm before its head, which this drafter shares; choose another family")
    return norms[-1]


def check_first(model: nn.Module, blocks: int, first: int) -> None:
    """Raise UserError unless `first` blocks are some but not all of a target's `blocks`, with whole weights."""
    check_whole(model, "runs the target's first blocks")
    if not 1 <= first < blocks:
        raise UserError(f"drafter.blocks is {first}; the target has {blocks}, choose 1..{blocks - 1}")
