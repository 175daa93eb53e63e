"""Measurements by a serving engine during training (`measure.engine`): when they start, and where their figures go.

The engine's process is rank 0's. It measures one step's drafter at a time, while training goes on. Its figures come some steps
later. They are logged then, with their own step, and stored with the checkpoint of that step, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import copy2
from time import sleep
from typing import Any, Protocol

from drafttrain.core.errors import Interrupted
from drafttrain.drafters.checkpoint import META, WEIGHTS, list_checkpoints, step_of
from drafttrain.train.checkpoint_manager import CheckpointManager, Progress, engine_figures, store_engine_figures
from drafttrain.train.engine import World
from drafttrain.train.interrupt import Interrupt
from drafttrain.train.logger import Logger

Figures = dict[str, Any]
PAUSE = 0.5  # seconds between two looks at a process that is waited for


class EngineProcess(Protocol):
    """A serving engine in a process of its own. Its failures are lines on the console, never exceptions."""

    @property
    def label(self) -> str:
        """Its name for people."""
        ...

    @property
    def step(self) -> int | None:
        """The step that is being measured."""
        ...

    @property
    def seconds_left(self) -> float:
        """Seconds until the measurement is given up."""
        ...

    def start(self, step: int, write: Callable[[Path], object]) -> None:
        """Export a checkpoint and start the engine on it. write: writes the checkpoint's files into a directory."""
        ...

    def collect(self) -> Figures | None:
        """The figures, if the measurement has ended; None otherwise, and where it has failed."""
        ...

    def close(self) -> None:
        """End the process and remove its files."""
        ...


OpenEngine = Callable[[Path, Callable[[str], None]], EngineProcess]  # of a run's directory and a function that prints a line


class EngineMeasurement:
    """The measurements of one run. All processes call its methods together; only rank 0 has the engine."""

    def __init__(
        self, process: EngineProcess | None, checkpoints: CheckpointManager, world: World, say: Callable[[str], None]
    ) -> None:
        self.process, self.checkpoints, self.world, self.say = process, checkpoints, world, say
        self._tried: set[int] = set()
        self._skipped = False  # whether a skipped measurement was reported
        self._held: Figures = {}  # of a measurement that `start` has found to be ended
        self._announced: int | None = None  # the step that is waited for

    @property
    def busy(self) -> bool:
        """Whether this process has an engine that measures now, or figures that were not logged."""
        return bool(self._held) or (self.process is not None and self.process.step is not None)

    def start(self, step: int, write: Callable[[Path], object]) -> None:
        """Measure this step's drafter, unless the last measurement still runs. Rank 0 only."""
        if self.process is None:
            return
        self._held |= self._collected()  # a measurement that has ended since the last look must not make this one skipped
        if (current := self.process.step) is not None:
            if not self._skipped:
                self.say(
                    f"{self.process.label} still measures step {current}, so it skips step {step}, and later steps while it is "
                    "busy"
                )
            self._skipped = True
            return
        self._tried.add(step)
        self.process.start(step, write)
        self.checkpoints.measured_step = self.process.step

    def resume(self, checkpoint: Path) -> None:
        """Measure the checkpoint that training continues from, if its measurement was lost."""
        if self.process is not None and self._lacking(checkpoint):
            self.start(step_of(checkpoint), partial(_copy, checkpoint))

    def collected(self) -> Figures:
        """The figures to log of a measurement that has ended since the last call; empty otherwise."""
        figures, self._held = self._held or self._collected(), {}
        return figures

    def _collected(self) -> Figures:
        if self.process is None or (step := self.process.step) is None:
            return {}
        figures = self.process.collect()
        if self.process.step is None:
            self.checkpoints.measured_step = None
        if figures is None:
            return {}
        store_engine_figures(self.checkpoints.folder, step, figures)
        if self.checkpoints.by_engine:
            self.checkpoints.prune()
        return {f"engine/{name}": value for name, value in figures.items()}

    def finish(self, step: int, logger: Logger | None, interrupt: Interrupt | None, alive: Callable[[], None]) -> None:
        """Wait for the running measurement, and measure the last checkpoint if it was not; with `measure.best=engine` all that
        are kept. alive: called while it waits. When interrupted, raises Interrupted in all processes.
        """
        running = True
        while running:
            running = self._goes_on()
            figures = self.collected()
            if logger is not None and figures:
                logger.step(step, figures)
            alive()
            if running and any(self.world.gather(interrupt is not None and interrupt.requested)):
                raise Interrupted("while an engine measured; training has ended and is saved", together=True)
            sleep(PAUSE if running else 0.0)

    def _goes_on(self) -> bool:
        """Start the next measurement if none runs; whether one runs now."""
        step = None
        if self.process is not None:
            self._start_kept(self.process)
            step = self.process.step
            if step is not None and step != self._announced:
                self._announced = step
                time_left = f"{self.process.seconds_left:,.0f} s"
                self.say(f"waiting for {self.process.label} to measure step {step}, at most {time_left}")
        return bool(self.world.share(step is not None))

    def _start_kept(self, process: EngineProcess) -> None:
        """Measure the next kept checkpoint that was not, unless a measurement runs."""
        checkpoints = list_checkpoints(self.checkpoints.folder)
        for checkpoint in checkpoints if self.checkpoints.by_engine else checkpoints[-1:]:
            if process.step is None and step_of(checkpoint) not in self._tried and self._lacking(checkpoint):
                self.start(step_of(checkpoint), partial(_copy, checkpoint))

    def _lacking(self, checkpoint: Path) -> bool:
        return engine_figures(checkpoint) is None and not Progress.of(checkpoint).passing


def _copy(checkpoint: Path, directory: Path) -> None:
    """Copy the drafter out of a checkpoint, without the optimiser's state. The checkpoint may be removed later."""
    for name in (META, WEIGHTS):
        copy2(checkpoint / name, directory / name)


@contextmanager
def engine_measurement(
    open_engine: OpenEngine | None, run_dir: Path, checkpoints: CheckpointManager, world: World, say: Callable[[str], None]
) -> Iterator[EngineMeasurement]:
    """The measurements of a run; at the end the engine's process is ended. open_engine: None without `measure.engine`."""
    process = open_engine(run_dir, say) if open_engine is not None and world.first else None
    try:
        yield EngineMeasurement(process, checkpoints, world, say)
    finally:
        if process is not None:
            process.close()
