"""Progress bar of the preparation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

BAR_FROM = 2000  # conversations; fewer need no bar


@contextmanager
def bar(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that is called with the number of newly prepared conversations."""
    if not shown or total < BAR_FROM:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, advance=count)
