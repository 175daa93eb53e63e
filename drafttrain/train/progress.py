"""Console output of training: a progress bar with loss and rate, and a line of figures every few steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from time import monotonic
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import Progress

from drafttrain.core.console import StageProgress, bars

WIDE = 100  # columns from which the bar also shows the shares of time
LINES = 40  # of figures at most, where no terminal shows them
WINDOW = 50  # steps of a running mean
AVERAGED = ("loss", "expected_tau")


class TrainingProgress:
    """The progress bar of training, with the rate since it began. progress: None on ranks above 0, which print nothing."""

    def __init__(self, progress: Progress | None, total: int, done: int) -> None:
        self.progress, self.total, self.tokens, self.began = progress, total, 0, monotonic()
        self.stage = StageProgress(progress, "training", total, done, lines=False) if progress else None
        self.terminal = progress is not None and progress.console.is_terminal
        self.printed = -total  # step of the last line

    def step(self, step: int, tokens: int, values: Mapping[str, Any], line: bool) -> None:
        """Advance the bar. line: also print the step's figures above the bar; without a terminal `LINES` times at most."""
        if self.progress is None or self.stage is None:
            return
        self.tokens += tokens
        rate = self.tokens / max(monotonic() - self.began, 1e-6)
        share_text = shares(values) if self.progress.console.width >= WIDE else ""
        self.stage.update(step, f"{rate:,.0f} tokens/s  loss {values['loss']:.3f}{share_text}")
        if line and (self.terminal or step - self.printed >= self.total / LINES):
            self.printed = step
            agreement = " ".join(f"{a:.2f}" for a in values["agreement"])
            loss, tau = (f"{values[name]:.{d}f}{_mean(values, name, d)}" for name, d in (("loss", 3), ("expected_tau", 2)))
            self.progress.console.print(
                f"step {step:>{len(str(self.total))}}/{self.total}  loss {loss}  agreement {agreement}  "
                f"expected tau {tau}  {rate:,.0f} tokens/s  lr {values['lr']:.1e}{shares(values)}"
                + ("" if self.terminal else f"  {self.stage.left(step)}"),
                highlight=False,
                soft_wrap=True,
            )
        if "measured_tau" in values:
            speedup = f"{values['measured_speedup']:.2f}x"
            self.progress.console.print(
                f"step {step}: measured tau {values['measured_tau']:.2f}, {speedup}", highlight=False, soft_wrap=True
            )


def _mean(values: Mapping[str, Any], name: str, digits: int) -> str:
    """` (mean 0.123)`: the running mean of a figure, if there is one."""
    mean = values.get(f"{name}_mean{WINDOW}")
    return "" if mean is None else f" (mean {mean:.{digits}f})"


class RunningMeans:
    """Means of the figures over the last `WINDOW` steps. They start again when a run is resumed.

    A batch has few tokens, so its figures scatter: expected tau was 1.34, 3.81 and 2.28 within 30 steps.
    """

    def __init__(self) -> None:
        self._last: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)

    def step(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Add a step's figures; returns the running means to log."""
        if all(isfinite(values[name]) for name in AVERAGED):  # others are of steps that changed nothing
            self._last.append({name: values[name] for name in AVERAGED})
        if not self._last:
            return {}
        return {f"{name}_mean{WINDOW}": sum(v[name] for v in self._last) / len(self._last) for name in AVERAGED}


def shares(values: Mapping[str, Any]) -> str:
    """`  mfu 31%  target 40%  data 2%`: the share of the device's peak, and the shares of the step's time.

    With a serving engine also the share of the time that training waited for its states, which is part of data's.
    """
    ratios = {"mfu": values["mfu"], "target": values["target_share"], "data": values["data_share"]}
    ratios["waiting for states"] = values.get("states_wait_share")
    return "".join(f"  {name} {ratio:.0%}" for name, ratio in ratios.items() if ratio is not None)


class Console:
    """Console output of training. rich: None on ranks above 0, which print nothing."""

    def __init__(self, rich: RichConsole | None) -> None:
        self.rich = rich

    def say(self, text: str) -> None:
        """Print a line."""
        if self.rich is not None:
            self.rich.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def bar(self, total: int, done: int) -> Iterator[TrainingProgress]:
        """The progress bar of training."""
        if self.rich is None:
            yield TrainingProgress(None, total, done)
            return
        with bars(self.rich) as progress:
            yield TrainingProgress(progress, total, done)
