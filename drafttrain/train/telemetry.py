"""What a training step cost: its time by part, its share of the device's peak, its memory."""

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
    """Of one step in one process. Shares are of its seconds; a target that is trained too has no forward of its own.
    mfu: of the device's dense bfloat16 peak; None where that is not known. peak_memory: bytes, since the process began.
    flops: of this process, as `Flops` counts them.
    """

    seconds: float
    target_share: float
    data_share: float
    rest_share: float
    mfu: float | None
    peak_memory: int
    flops: float

    def values(self) -> dict[str, Any]:
        """As they are logged; seconds are in the rate already, operations in the share of the peak."""
        return {name: value for name, value in asdict(self).items() if name not in ("seconds", "flops")}


class Meter:
    """Clocks for the parts of a step, `step` for all of it. On a GPU the target's part is timed by events, which are read once
    they have passed: nothing waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak, self.flops = device, peak_of(device), Flops()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begin()

    def _begin(self) -> None:
        self._began, self._data, self._target, self._work = perf_counter(), 0.0, 0.0, 0.0

    @contextmanager
    def data(self) -> Iterator[None]:
        """Around what waits for the next batch."""
        began = perf_counter()
        yield
        self._data += perf_counter() - began

    @contextmanager
    def target(self) -> Iterator[None]:
        """Around the frozen target's forward pass."""
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
        """Around forward and backward of both models."""
        with self.flops.counting(batch):
            yield
        self._work += self.flops.of(batch)

    def step(self) -> StepCost:
        """What the step took that ends here; the next one begins."""
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
        """What went on since the last step was no training."""
        self._begin()


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
