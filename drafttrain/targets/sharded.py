"""A frozen target whose blocks' weights are sharded over the training processes (ZeRO-3, arXiv 1910.02054, section 5.3).

Every process runs its own batch. A block's weights are gathered before it runs and dropped afterwards. All processes make the
same calls in the same order. Embedding, last norm and head are whole on every process: losses and drafters read them throughout
a step, in numbers of chunks that differ between processes, so that sharding them would not lower the peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.model.low_rank import LowRank
from drafttrain.targets.fast import FastTarget, why_not
from drafttrain.targets.fingerprint import fingerprint_of
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.structure import find_backbone, find_blocks, shape_of


class Shards(Protocol):
    """The library that shards weights; training provides it."""

    def loading(self) -> AbstractContextManager[None]:
        """A context in which a model is sharded while it is loaded: only one parameter at a time is whole."""
        ...

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """A context in which these parameters are whole on every process."""
        ...

    def start(self, blocks: nn.ModuleList) -> nn.Module:
        """A module that calls its first argument with the others: one pass over the blocks, which gathers and drops weights."""
        ...

    def free(self) -> None:
        """Drop this process's shards. The model cannot be used afterwards."""
        ...


class ShardedTarget(HFTarget):
    """As HFTarget, for a model that was loaded within `shards.loading()`."""

    def __init__(self, model: PreTrainedModel, shards: Shards, stop_ids: frozenset[int] = frozenset()) -> None:
        self.shards = shards
        model.requires_grad_(False).eval()
        blocks = find_blocks(model, shape_of(model.config.get_text_config()).blocks)
        make_whole(model, blocks, shards)
        one_pass(find_backbone(model, len(blocks)), shards.start(blocks))
        super().__init__(model, stop_ids)

    capture_reason = "its weights are spread over processes"

    def _fingerprint(self) -> str:
        return fingerprint_of(self.model, lambda parameter: self.shards.gathered([parameter]))

    def pruned(self, blocks: int) -> HFTarget:
        first = list(find_blocks(self.model, self.shape.blocks))[: max(blocks, 0)]
        with self.shards.gathered(p for block in first for p in block.parameters()):
            return super().pruned(blocks)

    def shallow(self, blocks: int) -> NoReturn:
        raise UserError(
            "this drafter runs the target's first blocks by themselves, and they are sharded over processes; choose a family "
            "with its own layers, or a target that fits one device"
        )

    def with_added(self, added: Mapping[str, LowRank]) -> NoReturn:
        raise UserError(
            "this drafter trains through the target's blocks, and they are sharded over processes; choose a family with its "
            "own layers, or set target.placement=replicated"
        )

    def _trainable(self, model: PreTrainedModel) -> HFTarget:
        runner = HFTarget if why_not(model) else FastTarget
        return runner(model, self.stop_ids, frozen=False)

    def free(self) -> None:
        self.shards.free()
        super().free()


@torch.no_grad()
def make_whole(model: PreTrainedModel, blocks: nn.ModuleList, shards: Shards) -> None:
    """Replace all parameters outside the blocks by unsharded ones. Tied parameters stay tied."""
    block_param_ids, unsharded = {id(p) for p in blocks.parameters()}, dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in block_param_ids:
                continue
            if id(parameter) not in unsharded:
                with shards.gathered([parameter]):
                    unsharded[id(parameter)] = nn.Parameter(parameter.data.clone(), requires_grad=False)
            setattr(module, name, unsharded[id(parameter)])


def one_pass(backbone: Any, trunk: nn.Module) -> None:
    """Send every forward of the backbone through the trunk."""
    original_forward = backbone.forward

    @wraps(original_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs: Tensor | Any = trunk(original_forward, *args, **kwargs)
        return outputs

    backbone.forward = forward
