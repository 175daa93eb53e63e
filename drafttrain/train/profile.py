"""Profiles some training steps and writes a Chrome trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from drafttrain.core.errors import UserError

AFTER, LENGTH = 5, 3  # in steps: one-time costs are over after 5 steps, and a trace of 3 steps is small


def window(option: Any, first: int, last: int) -> range:
    """The steps to record, counted from 1. Raises UserError for anything but false, true or two steps in order.

    option: `train.profile`. first: the steps done before this session. last: the last step of the run.
    """
    if option is False or option is None:
        return range(0)
    if option is True:
        start = min(first + AFTER, max(first, last - LENGTH + 1))
        return range(start, start + LENGTH)
    steps = list(option) if isinstance(option, list | tuple) else []
    if len(steps) != 2 or not all(type(s) is int for s in steps) or not 1 <= steps[0] <= steps[1]:
        raise UserError(f"train.profile is {option!r}; set it to true, false, or the first and last step such as [10,12]")
    return range(steps[0], steps[1] + 1)


class Profile:
    """Records `steps` (counted from 1) and writes the trace to `file`. `step` wraps each training step.

    file: None: record nothing in this process.
    """

    def __init__(self, steps: range, file: Path | None, say: Callable[[str], None]) -> None:
        self.steps, self.file, self.say = steps if file else range(0), file, say
        self._running: profile | None = None

    def __enter__(self) -> Profile:
        return self

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if step in self.steps and self._running is None:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._running.start()
        yield
        if step + 1 not in self.steps:
            self._write()

    def _write(self) -> None:
        if self._running is None:
            return
        profiler, self._running = self._running, None
        profiler.stop()
        profiler.export_chrome_trace(str(self.file))
        self.say(f"trace: {self.file}; open it at https://ui.perfetto.dev or in chrome://tracing")

    def __exit__(self, *_: object) -> None:
        self._write()
