"""Two ways to compute the same result at growing sizes: seconds and peak memory of each, forward and backward.

A way that would not fit in memory is not run. Its need is then estimated: the peak of its first, smallest cell, scaled with
the size of its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.table import Table

from benchmarks.common import WIDTH, Work, interleaved, peak, ratio, room, seconds


@dataclass(frozen=True)
class Entrant:
    """One size."""

    size: dict[str, int]
    scale: int  # size of the other way's largest tensor
    make: Callable[[], tuple[Work, Work]]  # makes both ways' work, ours first


@dataclass(frozen=True)
class Cell:
    """The result of one size."""

    size: dict[str, int]
    ours_bytes: int
    ours_seconds: float
    other_bytes: int  # measured, or estimated for a way that was not run
    other_seconds: float | None = None
    times: float | None = None  # the other way's seconds / ours, median of repeats
    low: float | None = None
    high: float | None = None


def contest(entrants: Sequence[Entrant], device: torch.device, repeats: int) -> Iterator[Cell]:
    """Run all sizes. The first one is always run."""
    first: tuple[int, int] | None = None
    for entrant in entrants:
        (ours, other), began = entrant.make(), perf_counter()
        ours_bytes, needs = peak(ours, device), 0 if first is None else first[1] * entrant.scale // first[0]
        if needs > room(device):
            alone = seconds(ours, device) if device.type == "cuda" else perf_counter() - began  # a CPU has no warm-up
            yield Cell(entrant.size, ours_bytes, alone, needs)
            continue
        other_bytes = peak(other, device)
        first = first or (entrant.scale, other_bytes)
        mine, theirs = interleaved(repeats, partial(seconds, ours, device), partial(seconds, other, device))
        line = ratio("", theirs, mine, "")
        yield Cell(entrant.size, ours_bytes, median(mine), other_bytes, median(theirs), line.value, line.low, line.high)


def cells_table(title: str, ours: str, other: str, cells: Sequence[Cell]) -> Table:
    names = (*cells[0].size, f"{ours}, MiB", f"{other}, MiB", "of it", f"{ours}, s", f"{other}, s", "times faster")
    table = Table(*names, title=title, title_justify="left", box=None, width=WIDTH)
    for cell in cells:
        table.add_row(*(f"{value:,}" for value in cell.size.values()), *_figures(cell))
    return table


def _figures(cell: Cell) -> Iterator[str]:
    yield f"{cell.ours_bytes / 2**20:,.1f}"
    if cell.other_seconds is None:
        yield from (f"not run: needs {cell.other_bytes / 2**30:,.1f} GiB", "", f"{cell.ours_seconds:.3f}", "", "")
        return
    yield from (f"{cell.other_bytes / 2**20:,.1f}", f"{cell.ours_bytes / cell.other_bytes:.1%}")
    yield from (f"{cell.ours_seconds:.3f}", f"{cell.other_seconds:.3f}", f"{cell.times:.2f} ({cell.low:.2f}-{cell.high:.2f})")


def record(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [asdict(cell) for cell in cells]


def draw(path: Path, panels: Sequence[tuple[str, str, Sequence[tuple[str, Sequence[Cell]]]]], ours: str, other: str) -> None:
    """Plot peak memory and seconds, one column for each panel: (title, the size along x, its lines by name).

    Hollow marks are estimates.
    """
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(2, len(panels), figsize=(5.5 * len(panels), 7), squeeze=False, layout="constrained")
    for column, (title, x, lines) in enumerate(panels):
        top, bottom = axes[0][column], axes[1][column]
        for number, (name, cells) in enumerate(lines):
            colour, at = f"C{number}", [cell.size[x] for cell in cells]
            run = [cell for cell in cells if cell.other_seconds is not None]
            idle = [cell for cell in cells if cell.other_seconds is None]
            top.plot(at, [c.ours_bytes / 2**30 for c in cells], "o-", color=colour, label=f"{ours}{name}")
            top.plot(at, [c.other_bytes / 2**30 for c in cells], ":", color=colour)
            top.plot([c.size[x] for c in run], [c.other_bytes / 2**30 for c in run], "s", color=colour, label=f"{other}{name}")
            top.plot([c.size[x] for c in idle], [c.other_bytes / 2**30 for c in idle], "s", color=colour, mfc="none")
            bottom.plot(at, [c.ours_seconds for c in cells], "o-", color=colour)
            bottom.plot([c.size[x] for c in run], [c.other_seconds for c in run], "s:", color=colour)
        for axis, label in ((top, "peak memory, GiB"), (bottom, "seconds, forward and backward")):
            axis.set(xscale="log", yscale="log", xlabel=x, ylabel=label)
            ticks = sorted({cell.size[x] for _, cells in lines for cell in cells})
            axis.set_xticks(ticks, [f"{tick / 1024:g}k" if tick >= 1024 else str(tick) for tick in ticks], minor=False)
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        top.set_title(title)
        top.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
