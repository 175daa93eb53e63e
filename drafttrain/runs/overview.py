"""Runs in one list, measured or not: what `compare` shows where they cannot be ranked, and what a sweep ends with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

import drafttrain
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_text
from drafttrain.core.intervals import with_interval
from drafttrain.drafters.checkpoint import list_checkpoints
from drafttrain.measure import cells
from drafttrain.measure.compare.runs import RunReport, names_of, settings_of, varied
from drafttrain.measure.markdown import render
from drafttrain.runs.directory import run_state
from drafttrain.train.checkpoint_manager import Progress, best_checkpoint

HEADER = (
    *("run", "family", "target", "steps", "expected tau", "tau", "speedup [min-max]", "exact"),
    *("measured with", "on", "differs in"),
)


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run in the list."""

    where: str
    settings: dict[str, Any]  # by dotted key
    family: str
    target: str
    steps: str = cells.MISSING  # of the best checkpoint, and how many there should be in a run that has not finished
    expected: str = cells.MISSING  # tau on held-out conversations, with its interval
    merit: tuple[float, float] = (0.0, 0.0)  # speedup and expected tau, 0 where unknown: the order of the list
    measured: tuple[str, str, str, str, str] = (cells.MISSING,) * 5  # under the last columns
    source: str = ""  # of a report of `drafttrain measure`: the checkpoint, as run and step


def list_runs(reports: Sequence[RunReport], unmeasured: Sequence[Path]) -> list[ListedRun]:
    """The measured runs, the fastest first, and then the others, that of the highest expected tau first."""
    runs = [*map(_measured, reports), *map(_unmeasured, unmeasured)]
    return sorted(runs, key=lambda run: run.merit, reverse=True)


def _measured(run: RunReport) -> ListedRun:
    report = run.report
    entry = next(e for e in report["checkpoints"] if e["name"] == report["best"])
    target, environment = report["target"], report["environment"]
    conditions = f"{entry['policy']}, temperature {entry['temperature']:g}, batch {entry['batch_size']}"
    return ListedRun(
        run.where,
        run.config,
        str(report["drafter"].get("family", cells.MISSING)),
        Path(str(target.get("path") or target.get("name"))).name,
        cells.MISSING if entry["step"] is None else str(entry["step"]),
        cells.expected(entry),
        (entry["speedup"] or 0.0, entry.get("expected_tau") or 0.0),
        (
            cells.number(entry["tau"]),
            cells.speedups(entry),
            cells.exact(entry),
            f"{conditions}, {entry['prompts']} prompts",
            str(environment.get("accelerator") or environment.get("processor") or environment.get("device")),
        ),
        "" if run.config else _source(Path(entry["path"])),
    )


def _source(checkpoint: Path) -> str:
    run = checkpoint.parent.parent
    own = checkpoint.parent.name == "checkpoints"
    return f"measures {run.parent.name}/{run.name}/{checkpoint.name}" if own else f"measures {checkpoint}"


def _unmeasured(run: Path) -> ListedRun:
    """A run with `measure=off`, one that goes on, or one that has stopped early."""
    settings = settings_of(run / "config.yaml")
    target = Path(str(settings.get("target.path") or settings.get("target.name", cells.MISSING))).name
    run_fields = (str(run), settings, str(settings.get("drafter.family", cells.MISSING)), target)
    try:
        if not list_checkpoints(run / "checkpoints"):
            return ListedRun(*run_fields)
        progress = Progress.of(best_checkpoint(run / "checkpoints"))
    except UserError:  # a damaged checkpoint
        return ListedRun(*run_fields)
    tau, interval = progress.expected_tau, progress.expected_interval
    text = cells.number(tau) if tau is None or interval is None else with_interval(tau, (interval[0], interval[1]))
    finished = (run_state(run) or {}).get("finished")
    steps = str(progress.step) if finished else f"{progress.step} of {settings.get('train.steps')}"
    return ListedRun(*run_fields, steps, text, (0.0, tau or 0.0))


def rows_of_list(runs: Sequence[ListedRun]) -> list[list[str]]:
    """The cells of each run, under `HEADER`."""
    names, keys = names_of([run.where for run in runs]), varied([run.settings for run in runs if run.settings])
    return [
        [
            names[run.where],
            run.family,
            run.target,
            run.steps,
            run.expected,
            *run.measured,
            run.source or ", ".join(f"{key}={run.settings[key]}" for key in keys if key in run.settings),
        ]
        for run in runs
    ]


def console_list(runs: Sequence[ListedRun], title: str) -> Table:
    """The list for the console: what a run is stands under its name."""
    table = cells.console_table(title, ("run", *HEADER[3:8]), ("run",))
    for column in table.columns[1:]:
        column.no_wrap = True
    for name, family, target, *figures, conditions, _, differs in rows_of_list(runs):
        details = [f"{family}, target {target}", *(differs.split(", ")[:3] if differs else [])]
        details += [conditions] if conditions != cells.MISSING else []
        run = Text(name)
        run.append("".join(f"\n{word}" for word in details), style="dim")
        table.add_row(run, *(cell.replace(" [", "\n[").replace(" (", "\n(") for cell in figures))
    return table


def write_list(folder: Path, runs: Sequence[ListedRun], notes: Sequence[str], command: str) -> list[Path]:
    """Write runs.html, whose columns sort, and runs.csv. Returns both."""
    rows = rows_of_list(runs)
    pages = [Path(run.where) / "report.html" for run in runs]
    page = render(
        "runs.html",
        title=f"{len(rows)} runs",
        version=drafttrain.__version__,
        command=command,
        header=HEADER,
        rows=rows,
        links=[quote(os.path.relpath(page, folder)) if page.exists() else None for page in pages],
        notes=notes,
    )
    atomic_write_text(folder / "runs.csv", cells.csv_text(list(HEADER), rows))
    atomic_write_text(folder / "runs.html", page)
    return [folder / "runs.html", folder / "runs.csv"]
