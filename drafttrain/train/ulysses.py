"""Sequence parallelism by DeepSpeed Ulysses (arXiv 2309.14509): processes split the positions of each sequence.

Shapes: as in `drafttrain.core.sequence_shard`. Decision 016 describes the exchanges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import Drafter
from drafttrain.model.layers import Attention
from drafttrain.objective.losses import END_TO_END, LossOptions
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.hf import HFTarget
from drafttrain.train import TrainOptions
from drafttrain.train.engine import World, head_exchange

HEADS, POSITIONS = 2, 1  # dimensions of the exchanged tensors


class Ulysses:
    """`drafttrain.core.sequence_shard.Group` by DeepSpeed's all-to-all. Its backward pass is the inverse exchange."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank, self.size, self._group, self._exchange = rank, size, group, head_exchange()

    def to_heads(self, x_BXhD: Tensor) -> Tensor:
        return self._swap(x_BXhD, HEADS, POSITIONS)

    def to_positions(self, x_BXkD: Tensor) -> Tensor:
        return self._swap(x_BXkD, POSITIONS, HEADS)

    def _swap(self, x: Tensor, scattered: int, gathered: int) -> Tensor:
        swapped: Tensor = self._exchange(self._group, x, scattered, gathered, 0)
        return swapped


def sequence_group(options: TrainOptions, world: World) -> Ulysses | None:
    """The group of processes that split sequences with this one; None without sequence parallelism. All processes call it."""
    size = options.sequence_parallel
    if size == 1:
        return None
    groups = [torch.distributed.new_group(list(range(start, start + size))) for start in range(0, world.size, size)]
    return Ulysses(world.rank % size, size, groups[world.rank // size])


def language_models(target: HFTarget, drafter: Drafter, adapter: Adapter | None) -> list[tuple[str, HFTarget]]:
    """The models that a training step runs over whole sequences, with their names in messages."""
    models = [("the target", target), *(("the drafter's model", m) for m in drafter.modules() if isinstance(m, HFTarget))]
    return models if adapter is None else [*models, ("the adapted target", adapter.target)]


def check_sequence_parallel(
    options: TrainOptions, loss: LossOptions, target: HFTarget, drafter: Drafter, adapter: Adapter | None
) -> None:
    """Raise UserError for what cannot be trained with sequence parallelism."""
    size = options.sequence_parallel
    if size == 1 or not drafter.trained:
        return
    setting = f"train.sequence_parallel is {size}"
    if options.on_policy:
        raise UserError(f"{setting}, but train.on_policy writes each reply in one process; leave one of them out")
    if loss.name == END_TO_END and any(isinstance(m, Drafter) and m.language_model() is not None for m in drafter.modules()):
        raise UserError(
            f"{setting}, but loss={END_TO_END} needs all positions of a sequence in one process; "
            "choose another loss, or set train.sequence_parallel=1"
        )
    modules, models = list(drafter.modules()), language_models(target, drafter, adapter)
    if not all(module.splits for module in modules if isinstance(module, Drafter)):
        raise UserError(f"{setting}, but this drafter's block needs whole sequences; set train.sequence_parallel=1")
    for label, model in models:
        if model.recurrent:
            raise UserError(
                f"{setting}, but the recurrent layers of {label}, {type(model.model).__name__}, read a sequence in order; "
                "set train.sequence_parallel=1"
            )
        if not model.unmasked:
            raise UserError(
                f"{setting}, but {label}, {type(model.model).__name__}, needs attention masks over whole sequences; "
                "set train.sequence_parallel=1"
            )
    heads = [(label, model.shape.heads) for label, model in models]
    for label, count in [*heads, *(("the drafter", m.shape.heads) for m in modules if isinstance(m, Attention))]:
        if count % size:
            valid_sizes = [n for n in range(2, count + 1) if count % n == 0]
            raise UserError(
                f"{setting}, which does not divide the {count} attention heads of {label}; "
                f"set it to {' or '.join(map(str, valid_sizes)) if valid_sizes else 1}"
            )
