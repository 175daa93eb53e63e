"""A step's figures are logged late, under its own number, and once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafttrain.train.checkpoint_manager import Progress
from drafttrain.train.logger import LateLog, StepResult, ToHost
from drafttrain.train.progress import TrainingProgress


class Lines:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def step(self, step: int, values: dict[str, Any]) -> None:
        self.seen.append((step, values))


def taken(loss: float) -> StepResult:
    sums = ToHost(torch.tensor([loss], dtype=torch.float64), torch.ones(6, 2), torch.tensor(0.5))
    return StepResult(sums, supervised=4, rate=1e-3, tokens=9, stop=False)


def test_late_log_flush_writes_each_step_once_under_its_number() -> None:
    progress, lines = Progress(), Lines()
    log = LateLog(progress, lines, TrainingProgress(None, 2, 0), every=1)  # type: ignore[arg-type]
    log.flush()
    log.add(1, taken(8.0), {"mfu": 0.1})
    log.more |= {"measured_tau": 3.0}
    assert not lines.seen
    log.flush()
    log.add(2, taken(4.0), {"mfu": 0.2})
    log.flush()
    log.flush()
    found = [(step, values["loss"], values["loss_mean50"], values["mfu"]) for step, values in lines.seen]
    assert found == [(1, 2.0, 2.0, 0.1), (2, 1.0, 1.5, 0.2)]
    first = lines.seen[0][1]
    assert (first["grad_norm"], first["measured_tau"], first["expected_tau"]) == (0.5, 3.0, pytest.approx(3.0))
    assert "measured_tau" not in lines.seen[1][1] and progress.loss == 1.0


def test_late_log_counts_steps_in_a_row_that_changed_nothing() -> None:
    progress, lines = Progress(), Lines()
    log = LateLog(progress, lines, TrainingProgress(None, 5, 0), every=1)  # type: ignore[arg-type]
    found = []
    bad = StepResult(ToHost(torch.tensor([torch.nan]), torch.ones(6, 2), torch.tensor(torch.inf)), 4, 1e-3, 9, False)
    for step, result in enumerate(
        (taken(8.0), bad, replace(taken(1.0), refused=True), replace(bad, left_out=4), taken(4.0)), 1
    ):
        log.add(step, result, {})
        log.flush()
        found.append(log.bad)
    assert found == [0, 1, 2, 3, 0] and progress.loss == 1.0
    assert lines.seen[3][1]["left_out"] == 4 and "left_out" not in lines.seen[1][1]
    assert lines.seen[4][1]["loss_mean50"] == pytest.approx((2.0 + 0.25 + 1.0) / 3), "without those that have no loss"
