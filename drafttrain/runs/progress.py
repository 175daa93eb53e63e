"""Progress bars of a measurement: one per stage, with tokens per second and time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from drafttrain.measure.bench import Watch


@contextmanager
def progress_bars(console: Console) -> Iterator[Watch]:
    """A `Watch` that draws progress bars. A console that is not a terminal gets the final state of each stage as a line."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, _Stage] = {}

        def watch(stage: str, done: int, total: int, tokens: int) -> None:
            if stage not in tasks:
                tasks[stage] = _Stage(progress, stage, total)
            tasks[stage].update(done, tokens)

        yield watch


class _Stage:
    """One bar. Its rate leaves out the first wave, whose start time is unknown."""

    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self.progress, self.tokens, self.began = progress, 0, 0.0
        self.task = progress.add_task(name, total=total, rate="")

    def update(self, done: int, tokens: int) -> None:
        if not self.began:
            self.began = monotonic()
            self.progress.update(self.task, completed=done)
            return
        self.tokens += tokens
        rate = self.tokens / max(monotonic() - self.began, 1e-6)
        self.progress.update(self.task, completed=done, rate=f"{rate:,.0f} tokens/s")
