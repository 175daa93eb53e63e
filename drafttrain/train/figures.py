"""A step's figures: summed over processes on the device, copied to the host without waiting for it, and logged a step later.

While the host reads and logs one step's figures, a GPU works on the next step. Shapes: K draft depths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafttrain.objective.losses import StepCounts
from drafttrain.train.checkpoint_manager import Progress
from drafttrain.train.logger import Logger
from drafttrain.train.progress import RunningMeans, TrainingProgress


class ToHost:
    """Tensors on their way to the host. `read` waits for these copies, not for what the device was given after them."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [_started(x) for x in tensors]
        self._copied: torch.cuda.Event | None = None
        if any(x.is_cuda for x in tensors):
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[Tensor]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies


def _started(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) if x.is_cuda else x


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimiser step of all processes."""

    sums: ToHost  # loss; counts [6, K]; the gradient's norm
    supervised: int  # tokens
    rate: float
    tokens: int  # that it read
    stop: bool  # whether any process must stop after it
    left_out: int = 0  # rows with a value that was not finite
    refused: bool = False  # whether it changed nothing, whatever the gradient

    def values(self) -> dict[str, Any]:
        """The figures to log. Waits until they are on the host."""
        loss, counts_6K, norm = self.sums.read()
        values = {"loss": float(loss) / self.supervised if self.supervised else math.nan}
        values |= figures(StepCounts.unpacked(counts_6K))
        values |= {"lr": self.rate, "grad_norm": float(norm), "supervised_tokens": self.supervised}
        return values | ({"left_out": self.left_out} if self.left_out else {})


@dataclass(slots=True)
class LateLog:
    """Logs a step's figures at `flush`, which is called when the next step has been launched. logger: on rank 0 only."""

    progress: Progress
    logger: Logger | None
    bar: TrainingProgress
    every: int  # steps between the console's lines
    more: dict[str, Any] = field(default_factory=dict)  # further figures of the step that is not logged yet
    bad: int = 0  # logged steps in a row that changed nothing
    _running: RunningMeans = field(default_factory=RunningMeans)
    _waiting: tuple[int, StepResult] | None = None

    def add(self, step: int, taken: StepResult, more: dict[str, Any]) -> None:
        assert self._waiting is None, "a step is logged before the next one is added"
        self._waiting, self.more = (step, taken), more

    def flush(self) -> None:
        """Log the last step that was added, and record its loss."""
        if self._waiting is None:
            return
        (step, result), self._waiting = self._waiting, None
        values = result.values()
        self.progress.loss = values["loss"] if math.isfinite(values["loss"]) else None
        self.bad = 0 if 0 <= values["grad_norm"] < math.inf and not result.refused else self.bad + 1
        values |= self._running.step(values) | self.more
        if self.logger is not None:
            self.logger.step(step, values)
        self.bar.step(step, result.tokens, values, line=step % self.every == 0)


def figures(counts: StepCounts) -> dict[str, Any]:
    """The figures to log: top-1 agreement, expected acceptance and loss by position, and a chain's expected tau (greedy)."""

    def per(numerator_K: Tensor, denominator_K: Tensor) -> Tensor:
        return numerator_K / denominator_K.clamp_min(1.0)

    alpha_K = per(counts.alive_correct, counts.alive)
    return {
        "agreement": per(counts.correct, counts.total).tolist(),
        "expected_acceptance": per(counts.acceptance, counts.total).tolist(),
        "expected_tau": 1.0 + float(alpha_K.cumprod(0).sum()),
        "loss_by_position": per(counts.loss, counts.total).tolist(),
    }
