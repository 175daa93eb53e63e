"""Shards the frozen target's weights over the training processes, by DeepSpeed's ZeRO-3 without an optimiser.

Decision 014 explains which weights are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from drafttrain.targets.estimate import LIVE
from drafttrain.train.engine import hushed, load_deepspeed

AHEAD = 9 * 10**8  # most parameters that are gathered while earlier ones compute: a block of a 70B model has 856 million


class Trunk(nn.Module):
    """The module that DeepSpeed wraps as the whole model. One call is one pass over the blocks."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class ZeroShards:
    """`drafttrain.targets.split.Shards` over the processes of the default group, which must exist."""

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
