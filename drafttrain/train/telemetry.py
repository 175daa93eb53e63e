"""Measures the cost of a training step: its time by part, its share of the device's peak, and its memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from drafttrain.model.batch import TrainBatch
from drafttrain.train.flops import Flops
from drafttrain.train.peaks import peak_of


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step in one process. Shares are shares of its seconds."""

    seconds: float
    target_share: float  # the frozen target's forward pass; 0 for a target that is trained too
    data_share: float  # waiting for data
    rest_share: float
    mfu: float | None  # model FLOPs utilisation, of the dense bfloat16 peak; None if the peak is unknown
    peak_memory: int  # bytes, since the process began
    flops: float  # see `Flops`

    def values(self) -> dict[str, Any]:
        """The figures to log. Seconds are logged as a rate, and operations as mfu."""
        return {name: value for name, value in asdict(self).items() if name not in ("seconds", "flops")}


class Meter:
    """Clocks for the parts of a step. On a GPU, events time the target's part; they are read later, without a sync."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak, self.flops = device, peak_of(device), Flops()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begin()

    def _begin(self) -> None:
        self._began, self._data, self._target, self._work = perf_counter(), 0.0, 0.0, 0.0

    @contextmanager
    def data(self) -> Iterator[None]:
        """Wraps waiting for the next batch."""
        began = perf_counter()
        yield
        self._data += perf_counter() - began

    @contextmanager
    def target(self) -> Iterator[None]:
        """Wraps the frozen target's forward pass."""
        if self.device.type != "cuda":
            began = perf_counter()
            yield
            self._target += perf_counter() - began
            return
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        yield
        pair[1].record()
        self._events.append(pair)

    @contextmanager
    def micro_batch(self, batch: TrainBatch) -> Iterator[None]:
        """Wraps forward and backward of both models."""
        with self.flops.counting(batch):
            yield
        self._work += self.flops.of(batch)

    def step(self) -> StepCost:
        """End a step, and return its cost. The next step begins."""
        target = self._target
        while self._events and self._events[0][1].query():
            first, last = self._events.pop(0)
            target += first.elapsed_time(last) / 1000
        seconds = perf_counter() - self._began
        data, target = min(self._data / seconds, 1.0), min(target / seconds, 1.0)
        mfu = None if self.peak is None else self._work / seconds / self.peak
        cost = StepCost(seconds, target, data, max(0.0, 1.0 - data - target), mfu, peak_memory(self.device), self._work)
        self._begin()
        return cost

    def pause(self) -> None:
        """Leave out the time since the last step, which was not training."""
        self._begin()


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
