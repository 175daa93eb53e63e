"""Long sequences: what training and evaluation hold in memory grows with the text, for every family, never with its square."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import Taps
from drafttrain.objective.losses import LossOptions, Objective, teacher_forced
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_model, tiny_target
from tests.tiny import NAMES, SHAPES

SERVED = [*product(("llama", "mistral-sliding"), (HFTarget, FastTarget)), ("gemma3-sliding", HFTarget)]
LENGTH = 512  # a mask of its square is a tenth of what is linear in it, or more
TARGET_LENGTH = 2 * LENGTH  # windows take 512 queries at once
ANCHORS = 32  # of block families: what their number alone decides is little


class Live(TorchDispatchMode):
    """Bytes of the tensors that are alive at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self._known:
            return
        self.now += size
        self.most = max(self.most, self.now)
        self._known[place] = weakref.finalize(storage, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self.now -= size
        del self._known[place]


def text(length: int, documents: int) -> TrainBatch:
    """One row of so many documents of equal length, all of it supervised."""
    generator = torch.Generator().manual_seed(0)
    token_BT = torch.randint(0, 64, (1, length), generator=generator)
    each = length // documents
    column_T = torch.arange(length)
    return TrainBatch(token_BT, (column_T % each)[None], (column_T // each)[None], torch.ones(1, length, dtype=torch.bool))


def most(work: Callable[[], Any]) -> int:
    with Live() as live:
        work()
    return live.most


FAST = ("medusa", "eagle3", "dspark", "draft_model")
SLOW = ("mtp_native", "peagle", "pard", "uno")  # the other kinds of attention in training
CASES = [pytest.param(name, SHAPES.get(name, {}), marks=[pytest.mark.slow] * (name in SLOW)) for name in NAMES]
CASES += [("hydra", {"prefix_layer": True}), ("dflash", {"block_size": 4, "target_layer_ids": [1], "weights": "dpace"})]


@pytest.mark.sampled(name=(*FAST, *SLOW))
@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_objective_memory_grows_linearly_with_sequence_length(name: str, options: dict[str, Any], documents: int) -> None:
    target, family = tiny_target(), families()[name]
    few = {"anchors": ANCHORS} if "anchors" in family.options.__dataclass_fields__ else {}
    drafter = family.build(family.options(**options, **few), target)
    objective = Objective(drafter, target, LossOptions(chunk=128))

    def step(batch: TrainBatch) -> None:
        drafter.train()
        objective(batch)[0].backward()

    def evaluation(batch: TrainBatch) -> None:
        teacher_forced(drafter.eval(), target, batch)

    for work in (step, evaluation) if drafter.trained else ():

        def whole(length: int, work: Callable[[TrainBatch], None] = work) -> None:
            work(Online(target, drafter.taps).fill(text(length, documents)))

        short, long = (most(partial(whole, length)) for length in (LENGTH, 2 * LENGTH))
        assert long <= 2 * short, f"{work.__name__}: {short:,} bytes, then {long:,}"


@pytest.mark.sampled
@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize(("name", "runner"), SERVED)
def test_target_memory_grows_linearly_with_sequence_length(name: str, runner: type[HFTarget], documents: int) -> None:
    model = tiny_model(name)
    model.config.max_position_embeddings = 2 * TARGET_LENGTH
    target = runner(model)
    online = Online(target, Taps((0, 2)))
    short, long = (most(partial(online.fill, text(length, documents))) for length in (TARGET_LENGTH, 2 * TARGET_LENGTH))
    assert long <= 2.1 * short, f"{short:,} bytes, then {long:,}"
