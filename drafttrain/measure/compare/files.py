"""Writes a comparison as compare.csv, pairs.csv, compare.md and compare.html, and saves it as a report at W&B."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drafttrain
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_text
from drafttrain.measure import cells
from drafttrain.measure.compare.columns import cell_rows, cost_text, figure_rows, header, pair_cells, varied_text
from drafttrain.measure.compare.ranking import UNITS, Comparison, Pair
from drafttrain.measure.markdown import render

PAIRS = ("figure", "first", "second", "prompts", "difference", "low", "high", "p", "p_corrected", "verdict")
SIZES = {"wide": (720, 400), "narrow": (340, 340)}
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 14, 46  # margins
RADIUS = 9
LOGARITHMIC = 20.0  # ratio of greatest to least cost from which the axis is logarithmic
PROJECT = re.compile(r"([\w.-]+)/([\w.-]+)")


def write_comparison(folder: Path, comparison: Comparison, command: str) -> list[Path]:
    """Write the four files atomically and return them. Other files in the folder stay."""
    contents = {
        "compare.csv": cells.csv_text(*figure_rows(comparison)),
        "pairs.csv": cells.csv_text(list(PAIRS), [_pair(comparison, pair) for pair in comparison.pairs]),
        "compare.md": markdown(comparison),
        "compare.html": page(comparison, command),
    }
    for name, text in contents.items():
        atomic_write_text(folder / name, text)
    return [folder / name for name in contents]


def markdown(comparison: Comparison) -> str:
    """The comparison as Markdown: table, pairs and notes."""
    parts = [f"# Comparison, by {comparison.sort}", cells.rows(header(comparison), cell_rows(comparison))]
    varied = [(row.label, varied_text(comparison, i, 99)) for i, row in enumerate(comparison.rows) if row.varied]
    if varied:
        parts.append("## Settings in which the runs differ\n\n" + "\n".join(f"- {name}: {text}" for name, text in varied))
    if comparison.pairs:
        names = ["", "first", "second", "prompts", "first - second [95 %]", "second vs first"]
        parts.append("## Pairs\n\n" + cells.rows(names, pair_cells(comparison)))
    if comparison.notes:
        parts.append("## To note\n\n" + "\n".join(f"- {note}" for note in comparison.notes))
    return "\n\n".join(parts) + "\n"


def _pair(comparison: Comparison, pair: Pair) -> list[Any]:
    low, high = (None, None) if pair.interval is None else (pair.interval.low, pair.interval.high)
    names = [comparison.rows[k].label for k in (pair.first, pair.second)]
    figures = [pair.difference, low, high, pair.p, pair.corrected]
    return [pair.figure, *names, pair.prompts, *figures, pair.verdict(comparison.level)]


def page(comparison: Comparison, command: str) -> str:
    """The whole page. command: the command line to show on it."""
    first = comparison.rows[0]
    return render(
        "compare.html",
        title=f"{len(comparison.rows)} runs by {comparison.sort}",
        version=drafttrain.__version__,
        command=command,
        entry=first.entry,
        target=first.run.report["target"],
        header=header(comparison),
        rows=cell_rows(comparison),
        varied=[varied_text(comparison, i, 99) for i in range(len(comparison.rows))],
        frontier=comparison.frontier,
        plots=plots(comparison),
        unit=UNITS[comparison.cost],
        pairs=pair_cells(comparison),
        tests=tests(comparison),
        level=comparison.level,
        notes=comparison.notes,
    )


def tests(comparison: Comparison) -> int:
    """Number of pairs tested per figure, which Holm's correction takes into account."""
    return max((sum(p.figure == name and p.p is not None for p in comparison.pairs) for name in ("speedup", "tau")), default=0)


def plots(comparison: Comparison) -> dict[str, Scatter]:
    """The scatter plots of speedup against training cost, for wide and narrow screens; none if no run has both."""
    points = comparison.points()
    if not points:
        return {}
    marks: list[dict[str, Any]] = []
    for i, cost, speed in points:
        entry = comparison.rows[i].entry
        tooltip = f"{comparison.rows[i].label}: {cells.speedups(entry)}, tau {cells.number(entry['tau'])}"
        tooltip += f", {cost_text(comparison, i)}"
        marks.append(
            {
                "rank": i + 1,
                "cost": cost,
                "speed": speed,
                "low": entry["speedup_min"],
                "high": entry["speedup_max"],
                "about": tooltip,
                "ahead": i in comparison.frontier,
            }
        )
    return {name: scatter(marks, width, height) for name, (width, height) in SIZES.items()}


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of an axis: its position in pixels and its label."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """A scatter plot of speedup against cost. All positions are in pixels."""

    width: int
    height: int
    marks: list[dict[str, Any]]  # the marks with x, y, and y_low, y_high of the repeats
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    one: float  # y of speedup 1
    steps: str  # the frontier's line as `x,y x,y ...`

    @property
    def box(self) -> dict[str, int]:
        return {"left": LEFT, "right": self.width - RIGHT, "top": TOP, "bottom": self.height - BOTTOM}


def scatter(marks: Sequence[dict[str, Any]], width: int, height: int) -> Scatter:
    """Place the marks. Each has rank, cost, speed, low, high, about, ahead. The line of speedup 1 is always visible."""
    costs, speeds = [m["cost"] for m in marks], [x for m in marks for x in (m["low"], m["high"], 1.0)]
    place_x, x_ticks = _cost_axis(costs, LEFT + 2 * RADIUS, width - RIGHT - 2 * RADIUS)
    step = _nice((max(speeds) - min(speeds)) / 4 or 0.1)
    low, high = step * max(0, math.floor(min(speeds) / step - 0.2)), step * math.ceil(max(speeds) / step + 0.2)

    def place_y(speed: float) -> float:
        return round(height - BOTTOM - (speed - low) / (high - low) * (height - BOTTOM - TOP), 1)

    placed = [
        m | {"x": place_x(m["cost"]), "y": place_y(m["speed"]), "y_low": place_y(m["low"]), "y_high": place_y(m["high"])}
        for m in marks
    ]
    y_values = [low + step * k for k in range(round((high - low) / step) + 1)]
    y_ticks = [Tick(place_y(value), f"{value:.{max(0, 2 if step < 0.1 else 1)}f}x") for value in y_values]
    return Scatter(width, height, placed, x_ticks, y_ticks, place_y(1.0), _steps(placed, width - RIGHT))


def _steps(marks: Sequence[dict[str, Any]], end: float) -> str:
    """The frontier's line as stairs: from each of its marks to the right, then up to the next mark."""
    frontier_marks = sorted((m for m in marks if m["ahead"]), key=lambda m: (m["cost"], m["speed"]))
    corners: list[tuple[float, float]] = []
    for mark in frontier_marks:
        if corners:
            corners.append((mark["x"], corners[-1][1]))
        corners.append((mark["x"], mark["y"]))
    if corners:
        corners.append((end, corners[-1][1]))
    return " ".join(f"{x},{y}" for x, y in corners)


def _cost_axis(costs: Sequence[float], left: float, right: float) -> tuple[Callable[[float], float], list[Tick]]:
    """(position of a cost, ticks). The axis is logarithmic if costs differ much and none is 0."""
    min_cost, max_cost = min(costs), max(costs)
    if min_cost > 0 and max_cost / min_cost >= LOGARITHMIC:
        low, high = math.floor(math.log10(min_cost)), math.ceil(math.log10(max_cost))
        stride = max(1, math.ceil((high - low) / 5))

        def place(cost: float) -> float:
            return round(left + (math.log10(cost) - low) / (high - low) * (right - left), 1)

        return place, [Tick(place(10.0**k), _short(10.0**k)) for k in range(low, high + 1, stride)]
    step = _nice(max_cost / 3 or 1.0)
    top = step * math.ceil(max_cost / step + 1e-9) or step

    def place_linear(cost: float) -> float:
        return round(left + cost / top * (right - left), 1)

    return place_linear, [Tick(place_linear(step * k), _short(step * k)) for k in range(round(top / step) + 1)]


def _nice(step: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= step * (1 - 1e-9))


def _short(value: float) -> str:
    return f"{value:.1e}".replace(".0e", "e").replace("e+", "e") if value >= 1e5 else f"{value:.4g}"


def check_project(name: str | None) -> None:
    """Raise UserError for a malformed project name, and if the library that writes reports is missing."""
    if name is None:
        return
    if not PROJECT.fullmatch(name):
        raise UserError(f"compare.wandb is {name!r}; name a project as ENTITY/PROJECT")
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        raise UserError("compare.wandb needs wandb-workspaces; pip install 'drafttrain[reports]'") from error


def save_report(comparison: Comparison, name: str, known: Sequence[str | None]) -> str:
    """Save the comparison to the project `name`; returns the new report's address.

    known: each row's W&B run as entity/project/id, or None. Raises UserError if W&B refuses or cannot be reached.
    """
    import wandb

    entity, project = name.split("/")
    report = _report(comparison, entity, project, [path for path in known if path is not None])
    try:
        report.save()
    except (wandb.Error, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot save the report in {name}: {reason}; check the name, and wandb login") from error
    return str(report.url)


def _report(comparison: Comparison, entity: str, project: str, runs: Sequence[str]) -> Any:
    """The report: tables of all runs, and plots of the runs that are at W&B."""
    import wandb_workspaces.reports.v2 as wr

    title = f"{len(comparison.rows)} runs by {comparison.sort}"
    blocks: list[Any] = [wr.MarkdownBlock(markdown(comparison).split("\n", 2)[2])]
    if runs:
        grid = wr.PanelGrid(runsets=_runsets(runs), panels=_panels(comparison))
        blocks = [wr.H2("Plots"), grid, wr.H2("Table"), *blocks]
    return wr.Report(project=project, entity=entity, title=title, description="by drafttrain compare", blocks=blocks)


def _runsets(runs: Sequence[str]) -> list[Any]:
    """A run set for each project."""
    import wandb_workspaces.reports.v2 as wr

    names_by_project: dict[tuple[str, str], list[str]] = {}
    for entity, project, name in (path.split("/") for path in runs):
        names_by_project.setdefault((entity, project), []).append(name)
    return [
        wr.Runset(entity=entity, project=project, name=project, filters=f"Metric('ID') in {names!r}")
        for (entity, project), names in names_by_project.items()
    ]


def _panels(comparison: Comparison) -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    summary: Callable[[str], Any] = wr.SummaryMetric
    speed, cost = summary("speedup"), summary(f"training_{comparison.cost}")
    return [
        wr.BarPlot(title="tau", metrics=[summary("tau")]),
        wr.BarPlot(title="speedup", metrics=[speed]),
        wr.ScatterPlot(title=f"speedup over training {comparison.cost}", x=cost, y=speed),
    ]
