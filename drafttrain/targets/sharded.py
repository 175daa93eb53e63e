"""A frozen target whose blocks' weights are spread over the processes that train (ZeRO-3, arXiv 1910.02054, section 5.3).

Every process feeds its own batch; a block's weights are gathered as its turn comes and dropped behind it. All processes make
the same calls in the same order. Embedding, last norm and head are whole on every process: losses and drafters read them all
through a step, and in numbers of chunks that differ between processes, so that gathering them would save nothing at the peak.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.targets.fast import FastTarget, why_not
from drafttrain.targets.fingerprint import fingerprint_of
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.structure import find_blocks, shape_of


class Shards(Protocol):
    """The library that spreads weights; training brings it along."""

    def loading(self) -> AbstractContextManager[None]:
        """A model that is read in here is spread from the beginning: one parameter at a time is whole."""
        ...

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """These parameters are whole on every process in here."""
        ...

    def start(self, blocks: nn.ModuleList) -> nn.Module:
        """A module that calls what it is given, with its arguments: one pass over the blocks, whose weights come and go."""
        ...

    def free(self) -> None:
        """Drop this process's shards; the model is of no use any more."""
        ...


class ShardedTarget(HFTarget):
    """As HFTarget, for a model that was read within `shards.loading()`."""

    def __init__(self, model: PreTrainedModel, shards: Shards, stop_ids: frozenset[int] = frozenset()) -> None:
        self.shards = shards
        model.requires_grad_(False).eval()
        blocks = find_blocks(model, shape_of(model.config.get_text_config()).blocks)
        make_whole(model, blocks, shards)
        one_pass(model.base_model, shards.start(blocks))
        super().__init__(model, stop_ids)

    def _fingerprint(self) -> str:
        return fingerprint_of(self.model, lambda parameter: self.shards.gathered([parameter]))

    def pruned(self, blocks: int) -> HFTarget:
        first = list(find_blocks(self.model, self.shape.blocks))[: max(blocks, 0)]
        with self.shards.gathered(p for block in first for p in block.parameters()):
            return super().pruned(blocks)

    def shallow(self, blocks: int) -> NoReturn:
        raise UserError(
            "this drafter runs the target's first blocks by themselves, and they are sharded over processes; choose a family "
            "with layers of its own, or a target that fits one device"
        )

    def _trainable(self, model: PreTrainedModel) -> HFTarget:
        runner = HFTarget if why_not(model) else FastTarget
        return runner(model, self.stop_ids, frozen=False)

    def free(self) -> None:
        self.shards.free()
        super().free()


@torch.no_grad()
def make_whole(model: PreTrainedModel, blocks: nn.ModuleList, shards: Shards) -> None:
    """Replace all parameters outside the blocks by plain ones with all their values; tied ones stay tied."""
    inside, made = {id(p) for p in blocks.parameters()}, dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in inside:
                continue
            if id(parameter) not in made:
                with shards.gathered([parameter]):
                    made[id(parameter)] = nn.Parameter(parameter.data.clone(), requires_grad=False)
            setattr(module, name, made[id(parameter)])


def one_pass(backbone: Any, trunk: nn.Module) -> None:
    """Every forward of the backbone goes through the trunk."""
    own = backbone.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        found: Tensor | Any = trunk(own, *args, **kwargs)
        return found

    backbone.forward = forward
