"""Shards the frozen target's weights over the training processes, by DeepSpeed's ZeRO-3, and sequences, by its Ulysses.

Decision 014 explains which weights are sharded. Shapes: as in `drafttrain.core.sequence_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import Drafter
from drafttrain.model.layers import Attention
from drafttrain.objective.losses import END_TO_END, LossOptions
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.estimate import LIVE
from drafttrain.targets.hf import HFTarget
from drafttrain.train import TrainOptions
from drafttrain.train.engine import World, head_exchange, hushed, load_deepspeed

AHEAD = 9 * 10**8  # most parameters that are gathered while earlier ones compute: a block of a 70B model has 856 million


class Trunk(nn.Module):
    """The module that DeepSpeed wraps as the whole model. One call is one pass over the blocks."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class ZeroShards:
    """`drafttrain.targets.split.Shards` over the processes of the default group, which must exist. There is no optimiser."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._library: Any = load_deepspeed()
        self._engine: Any = None
        self._settings = {
            "train_micro_batch_size_per_gpu": 1,  # required, but without effect without an optimiser
            "bf16": {"enabled": dtype == torch.bfloat16},
            "fp16": {"enabled": dtype == torch.float16},
            "zero_optimization": {"stage": 3},
            "steps_per_print": 2**31,
        }

    @contextmanager
    def loading(self) -> Iterator[None]:
        config_reference = HfDeepSpeedConfig(self._settings)  # transformers holds only a weak reference to it
        try:
            with hushed():
                yield
        finally:
            del config_reference
            unset_hf_deepspeed_config()

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._library.zero.GatheredParameters(list(parameters), modifier_rank=None)
        return context

    def start(self, blocks: nn.ModuleList) -> nn.Module:
        vectors = [p.ds_numel for p in blocks.parameters() if len(p.ds_shape) < 2]  # type: ignore[attr-defined]
        matrices = [sum(p.ds_numel for p in b.parameters() if len(p.ds_shape) > 1) for b in blocks]  # type: ignore[attr-defined]
        # One gather for all of a block, and the next block's meanwhile: it takes no longer than this block computes, as one
        # matrix's would. Blocks with many experts are too large to be whole twice; they are gathered module by module.
        for block, size in zip(blocks, matrices, strict=True):
            self._library.utils.set_z3_leaf_module(block, size <= AHEAD)
        zero_config = {
            "stage": 3,
            "stage3_param_persistence_threshold": max(vectors, default=0),
            "stage3_max_live_parameters": LIVE,
            "stage3_prefetch_bucket_size": min(AHEAD, max(matrices)),
        }
        with hushed():
            self._engine, *_ = self._library.initialize(
                model=Trunk(blocks), config=self._settings | {"zero_optimization": zero_config}
            )
        trunk: nn.Module = self._engine.module
        return trunk

    def free(self) -> None:
        """Free the weights. DeepSpeed keeps references to the modules, so their tensors are emptied one by one."""
        if self._engine is None:
            return
        for parameter in self._engine.module.parameters():
            parameter.data = parameter.data.new_empty(0)
            parameter.ds_tensor.data = parameter.ds_tensor.data.new_empty(0)
        self._engine.destroy()
        self._engine = None


HEADS, POSITIONS = 2, 1  # dimensions of the exchanged tensors


class Ulysses:
    """Sequence parallelism by DeepSpeed Ulysses (arXiv 2309.14509): processes split the positions of each sequence.

    A `drafttrain.core.sequence_shard.Group` by DeepSpeed's all-to-all, whose backward pass is the inverse exchange. Decision
    016 describes the exchanges.
    """

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
