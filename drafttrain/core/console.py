"""What a command shows: whole lines, and the progress of long work: bars on a terminal, a line now and then in a job's log.

Lines hold paths and names, so nothing in them is wrapped, highlighted or read as markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # decoding on a GPU machine works without rich
    from rich.console import Console
    from rich.progress import Progress

BETWEEN_LINES = 30.0  # seconds, of a stage without a terminal
SPEED_OVER = 120.0  # seconds over which a bar estimates the time left

Watch = Callable[[str, int, int, int], None]  # stage, parts done, parts in all, tokens this time


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a line."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def print_note(console: Console, text: str) -> None:
    """Print a note, in yellow."""
    print_line(console, f"note: {text}", "yellow")


def line_printer(console: Console) -> Callable[[str], None]:
    """A function that prints a line."""
    return partial(print_line, console)


class StageProgress:
    """Progress of one stage of the work. Without a terminal it prints a line every `BETWEEN_LINES` seconds, if `lines`."""

    def __init__(self, progress: Progress, name: str, total: int, done: int = 0, lines: bool = True) -> None:
        self.progress, self.name, self.total, self.first = progress, name, total, done
        self.began = self.printed = monotonic()
        self.lines = lines and not progress.console.is_terminal
        self.task = progress.add_task(name, total=total, completed=done, rate="")

    def update(self, done: int, rate: str = "") -> None:
        """done: parts of `total`, those of before the start included. rate: is shown beside them."""
        self.progress.update(self.task, completed=done, rate=rate)
        if self.lines and done < self.total and monotonic() - self.printed >= BETWEEN_LINES:
            self.printed = monotonic()
            figures = ", ".join(filter(None, (f"{self.name}: {done:,} of {self.total:,}", rate, self.left(done))))
            self.progress.console.print(figures, highlight=False, soft_wrap=True, markup=False)

    def left(self, done: int) -> str:
        """`0:12:34 left` at the mean speed since the start; empty before the first part is done."""
        if done <= self.first:
            return ""
        seconds = (monotonic() - self.began) / (done - self.first) * (self.total - done)
        return f"{timedelta(seconds=round(seconds))} left"


@contextmanager
def bars(console: Console) -> Iterator[Progress]:
    """Progress bars. A console that is not a terminal gets the final state of each as a line."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, speed_estimate_period=SPEED_OVER
    ) as progress:
        yield progress


@contextmanager
def counting(console: Console | None, name: str, total: int, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Progress of one stage. Yields a function that advances it by an amount. unit: of the rate. None prints nothing."""
    if console is None:
        yield lambda amount: None
        return
    with bars(console) as progress:
        stage, done = StageProgress(progress, name, total), 0.0

        def advance(amount: float) -> None:
            nonlocal done
            done += amount
            rate = done / max(monotonic() - stage.began, 1e-6)
            stage.update(round(done), f"{rate:,.0f} {unit}" if unit else "")

        yield advance


@contextmanager
def stages(console: Console) -> Iterator[Watch]:
    """Progress of several stages, each with its tokens per second. Yields the function that they report to."""
    with bars(console) as progress:
        stage_of: dict[str, StageProgress] = {}
        tokens_of: Counter[str] = Counter()

        def watch(name: str, done: int, total: int, tokens: int) -> None:
            if name not in stage_of:  # the first part's tokens have no start time
                for earlier in stage_of.values():  # one may end before its last part
                    progress.stop_task(earlier.task)
                stage_of[name] = StageProgress(progress, name, total, done)
                stage_of[name].update(done)
                return
            tokens_of[name] += tokens
            seconds = max(monotonic() - stage_of[name].began, 1e-6)
            stage_of[name].update(done, f"{tokens_of[name] / seconds:,.0f} tokens/s" if tokens_of[name] else "")

        yield watch
