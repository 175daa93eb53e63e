"""Shared by the benchmarks: ratios of interleaved runs, peak memory, tables and records."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], float]  # one repeat -> a figure
WIDTH = 150  # columns of a table


class DiffersError(Exception):
    """The two sides of a comparison compute different results."""


@dataclass(frozen=True)
class Line:
    """One ratio, top / bottom, as the median of repeats."""

    name: str
    value: float
    low: float
    high: float
    figures: str  # the two figures it is made of
    at_least: float | None = None  # its goal, if any

    @property
    def goal(self) -> str:
        if self.at_least is None:
            return ""
        return f">= {self.at_least}{'' if self.value >= self.at_least else ' MISSED'}"


def interleaved(repeats: int, *runs: Run) -> list[list[float]]:
    """Each run's figures. After a warm-up of each, one repeat of every run in turn."""
    for run in runs:
        run()
    return [list(column) for column in zip(*([run() for run in runs] for _ in range(repeats)), strict=True)]


def ratio(name: str, top: Sequence[float], bottom: Sequence[float], units: str, at_least: float | None = None) -> Line:
    """The ratio of two interleaved runs' figures. units: of both medians, for the text."""
    ratios, both = [a / b for a, b in zip(top, bottom, strict=True)], (median(top), median(bottom))
    return Line(name, median(ratios), min(ratios), max(ratios), units.format(*both), at_least)


def peak(work: Callable[[], object]) -> int:
    """Peak bytes of tensors that the work allocates on a CPU, intermediate results of operators included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    live = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def write_record(path: Path, **found: Any) -> None:
    """Write the figures as JSON, with the facts that their reader needs."""
    facts = {"threads": torch.get_num_threads(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    record = {"machine": platform.machine()} | facts
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | found, indent=1) + "\n", encoding="utf-8")


def report(console: Console, lines: Sequence[Line], file: Path | None) -> int:
    """Print the lines, write them to the file if there is one, and return the exit code of a run that was timed."""
    table = Table("ratio", "value", "of repeats", "goal", "figures", box=None, width=WIDTH)
    for line in lines:
        table.add_row(line.name, f"{line.value:.2f}", f"{line.low:.2f}-{line.high:.2f}", line.goal, line.figures)
    console.print(table)
    if file:
        write_record(file, lines=[asdict(line) for line in lines])
    return 0
