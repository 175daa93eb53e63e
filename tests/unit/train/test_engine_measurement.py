"""When a serving engine measures during training, with an engine that only counts its calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drafttrain.core.errors import Interrupted
from drafttrain.core.files import atomic_write_json
from drafttrain.drafters.checkpoint import META, WEIGHTS, checkpoint_name
from drafttrain.train import engine_measurement
from drafttrain.train.checkpoint_manager import PROGRESS, CheckpointManager, engine_figures
from drafttrain.train.engine import World
from drafttrain.train.engine_measurement import EngineMeasurement
from drafttrain.train.interrupt import Interrupt


class Counted:
    """An engine that ends when it is told to, or at once, and that fails at some steps."""

    label, seconds_left = "Counted", 60.0

    def __init__(self, at_once: bool = False, fails: tuple[int, ...] = ()) -> None:
        self.step: int | None = None
        self.at_once, self.fails, self.ended, self.started = at_once, fails, False, list[int]()

    def start(self, step: int, write: Callable[[Path], object]) -> None:
        self.started.append(step)
        self.ended = self.at_once
        self.step = None if step in self.fails else step

    def collect(self) -> dict[str, Any] | None:
        if not self.ended:
            return None
        step, self.step = self.step, None
        return {"step": step, "tau": 2.0}

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_measurement, "PAUSE", 0.0)


def measurement(engine: Counted, folder: Path, by_engine: bool = False) -> tuple[EngineMeasurement, list[str]]:
    said: list[str] = []
    checkpoints = SimpleNamespace(folder=folder, by_engine=by_engine, measured_step=None, prune=lambda: None)
    return EngineMeasurement(engine, cast(CheckpointManager, checkpoints), World(0, 1), said.append), said


def keep(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / checkpoint_name(step)).mkdir()
        atomic_write_json(folder / checkpoint_name(step) / PROGRESS, {"step": step})
        for name in (META, WEIGHTS):
            (folder / checkpoint_name(step) / name).touch()


def test_engine_measurement_busy_engine_skips_steps_with_one_message(tmp_path: Path) -> None:
    engine = Counted()
    found, said = measurement(engine, tmp_path)
    for step in (10, 20, 30):
        found.start(step, print)
        assert found.busy and found.collected() == {}
    assert engine.started == [10] and len(said) == 1 and "still measures step 10, so it skips step 20" in said[0]
    engine.ended = True
    assert found.collected() == {"engine/step": 10, "engine/tau": 2.0} and not found.busy


def test_engine_measurement_ended_measurement_is_collected_before_next_start(tmp_path: Path) -> None:
    engine = Counted()
    found, said = measurement(engine, tmp_path)
    found.start(10, print)
    engine.ended = True
    found.start(20, print)
    assert engine.started == [10, 20] and not said
    assert found.collected() == {"engine/step": 10, "engine/tau": 2.0} and found.collected() == {} and found.busy


@pytest.mark.parametrize(("by_engine", "late"), [(False, [30]), (True, [10, 20, 30])])
def test_engine_measurement_finish_measures_last_or_all_kept_checkpoints(
    by_engine: bool, late: list[int], tmp_path: Path
) -> None:
    keep(tmp_path, 10, 20, 30)
    engine = Counted(at_once=True, fails=(20,))
    found, said = measurement(engine, tmp_path, by_engine)
    found.finish(30, None, None, lambda: None)
    assert engine.started == late and len(said) == len(set(late) - {20})
    measured = [step for step in (10, 20, 30) if engine_figures(tmp_path / checkpoint_name(step))]
    assert measured == [step for step in late if step != 20]


def test_engine_measurement_finish_requested_interrupt_raises_interrupted(tmp_path: Path) -> None:
    keep(tmp_path, 10)
    found, _ = measurement(Counted(), tmp_path)
    interrupt = Interrupt()
    interrupt.requested = True
    with pytest.raises(Interrupted, match="while an engine measured"):
        found.finish(10, None, interrupt, lambda: None)
