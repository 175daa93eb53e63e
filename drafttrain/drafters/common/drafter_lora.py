"""LoRA on a drafter of any family, by peft (arXiv 2106.09685): its own weights are frozen, low-rank matrices are trained.

A checkpoint holds both apart: the weights under their own names, the matrices as `lora.<path>.lora_A.weight` and `lora_B`.
Loading adds each product to its weight, so what decodes is a drafter as any other.

Shapes: O output width, I input width, R rank.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import Drafter, trainable
from drafttrain.model.lora import LoraOptions

PREFIX = "lora."  # of the matrices' names in a checkpoint
NAME = "default"  # peft's name for a single adapter
BASE = re.compile(r"(?P<path>.+)\.base_layer\.(?P<last>\w+)")
MATRIX = re.compile(rf"(?P<path>.+)\.(?P<which>lora_[AB])\.{NAME}\.weight")
FIRST = re.compile(rf"{re.escape(PREFIX)}(?P<path>.+)\.lora_A\.weight")


def adapted_maps(drafter: Drafter, options: LoraOptions, vocab: int) -> dict[str, nn.Linear]:
    """The linear maps that get matrices, by name: `options.targets`, or else all trained ones but heads over a vocabulary.

    vocab: size of the target's vocabulary. Raises UserError where there are none.
    """
    if any("lora_" in name for name, _ in drafter.named_parameters()):
        raise UserError(
            "train.lora needs a drafter without low-rank matrices, this one has some; leave train.lora out, or set "
            "drafter.lora_rank=0 where the family has other weights to train"
        )
    maps = {n: m for n, m in drafter.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
    vocabularies = {vocab, *_own_vocabularies(drafter)}
    inner = {name: module for name, module in maps.items() if module.out_features not in vocabularies}
    chosen = {n: m for n, m in maps.items() if _named(n, options.targets)} if options.targets else inner
    available = sorted({_kind(name) for name in maps})
    unknown = [target for target in options.targets if not any(_named(name, [target]) for name in maps)]
    if unknown or not chosen:
        problem = f"train.lora.targets has {', '.join(unknown)}" if unknown else "train.lora finds no linear map to adapt"
        raise UserError(f"{problem}; the drafter's trained linear maps are {', '.join(available) or 'none'}")
    for name, module in chosen.items():
        if tied := _tied(drafter, module):
            raise UserError(f"train.lora.targets has {name}, whose weight is that of {tied} too; choose other linear maps")
    return chosen


def added(maps: Mapping[str, nn.Linear], rank: int) -> int:
    """Parameters of the matrices."""
    return sum(rank * (module.in_features + module.out_features) for module in maps.values())


def trained_and_frozen(drafter: Drafter, options: LoraOptions, vocab: int) -> tuple[int, int]:
    """(parameters that are trained, parameters that LoRA freezes) of a drafter without matrices; a rank of 0 freezes none."""
    if not options.rank:
        return trainable(drafter), 0
    return added(adapted_maps(drafter, options, vocab), options.rank), trainable(drafter)


def add_matrices(drafter: Drafter, options: LoraOptions, vocab: int) -> None:
    """Freeze the drafter and give its maps matrices, B zero: it drafts as before. Only the matrices need gradients.

    Each map becomes peft's layer in place and stays the same object, because joined weights and aliases refer to it.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds, and few runs need it

    maps = list(adapted_maps(drafter, options, vocab).values())
    drafter.requires_grad_(False)
    layers = nn.ModuleDict({str(number): copy.copy(module) for number, module in enumerate(maps)})
    config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=list(layers))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, layers, NAME)
    for module, layer in zip(maps, layers.values(), strict=True):
        module.__class__, module.__dict__ = layer.__class__, layer.__dict__  # type: ignore[assignment]


def name_in_checkpoint(name: str) -> str:
    """The name in a checkpoint of a tensor of a drafter with matrices."""
    if match := MATRIX.fullmatch(name):
        return f"{PREFIX}{match['path']}.{match['which']}.weight"
    match = BASE.fullmatch(name)
    return name if match is None else f"{match['path']}.{match['last']}"


def matrices_of(state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A_RI and B_OR by the path of their map, in the order of paths, since a file read again is in any order.

    Raises UserError for matrices without their pair or their weight.
    """
    matrices = {}
    for name, a_RI in sorted(state.items(), key=lambda item: item[0]):
        if match := FIRST.fullmatch(name):
            path = match["path"]
            b_OR, weight_OI = state.get(f"{PREFIX}{path}.lora_B.weight"), state.get(f"{path}.weight")
            shapes_match = b_OR is not None and weight_OI is not None and weight_OI.shape == (len(b_OR), a_RI.shape[1])
            if b_OR is None or not shapes_match or b_OR.shape[1] != len(a_RI):
                raise UserError(f"the checkpoint's LoRA does not fit {path}.weight; use another checkpoint of the run")
            matrices[path] = a_RI, b_OR
    return matrices


@torch.no_grad()
def merged(state: Mapping[str, Tensor], lora: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """A checkpoint's tensors with the matrices' products added to their weights, in float32; the others as they are.

    lora: the checkpoint's `LoraOptions` as plain data; None: there are no matrices.
    """
    if lora is None:
        return dict(state)
    options = LoraOptions(**lora)
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)}
    for path, (a_RI, b_OR) in matrices_of(state).items():
        weight_OI = tensors[f"{path}.weight"].float()
        tensors[f"{path}.weight"] = weight_OI + (b_OR.float() @ a_RI.float()) * (options.alpha / options.rank)
    return tensors


def _own_vocabularies(drafter: Drafter) -> Iterator[int]:
    """Sizes of the parts of the target's vocabulary that the drafter and its parts draft from."""
    ids = getattr(drafter, "ids", None)
    if ids is not None:
        yield len(ids)
    for component in drafter.parts.values():
        yield from _own_vocabularies(component)


def _named(name: str, targets: list[str]) -> bool:
    """Whether a target is the map's name, its last parts, or its last part that is no number."""
    return any(target in (name, _kind(name)) or name.endswith(f".{target}") for target in targets)


def _kind(name: str) -> str:
    """The last part of a name that is no number."""
    return next((component for component in reversed(name.split(".")) if not component.isdigit()), name)


def _tied(drafter: Drafter, module: nn.Linear) -> str | None:
    """Another module with the same weight."""
    tied_names = (n for n, m in drafter.named_modules() if m is not module and getattr(m, "weight", None) is module.weight)
    return next(tied_names, None)
