"""Writes and reads a measurement: report.json, report.md, report.html and the figures. Each file is written atomically."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, atomic_write_text
from drafttrain.measure.engine_report import acceptance_entries
from drafttrain.measure.flags import best
from drafttrain.measure.markdown import markdown
from drafttrain.measure.page import page
from drafttrain.measure.sheet import write_sheet

SCHEMA_VERSION = 2
FILE = "report.json"

Report = dict[str, Any]


def report_of(
    body: dict[str, Any],
    target: dict[str, Any],
    drafter: dict[str, Any],
    environment: dict[str, Any],
    training: dict[str, Any] | None = None,
    chosen: str | None = None,
) -> Report:
    """The report (report.schema.json) of a measurement. body: the result of `measure_checkpoints`. chosen: the checkpoint that
    is the best by other figures; None: the best by these.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "target": target,
        "drafter": drafter,
        "environment": environment,
        "measure": body["measure"],
        "checkpoints": body["checkpoints"],
        "best": best([e for e in body["checkpoints"] if chosen in (None, e["name"].split()[0])]),
        "engines": [],
        "training": training,
    }


def write_report(folder: Path, report: Report, metrics: Path | None = None, draw: bool = True) -> list[Path]:
    """Write figures, report.html, report.md and, last, report.json into `folder`. metrics: the training run's metrics.jsonl.
    draw: False for a report that is soon written again, because figures take most of the time.

    Returns the files written. Raises UserError on a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = _figures(folder, report, metrics) if draw else []
    written = [*figures, *write_sheet(folder, report), folder / "report.html", folder / "report.md", folder / FILE]
    atomic_write_text(folder / "report.html", page(rounded(report), metrics))
    atomic_write_text(folder / "report.md", markdown(report, [path.name for path in figures]))
    atomic_write_json(folder / FILE, rounded(report))
    return written


def _figures(folder: Path, report: Report, metrics: Path | None) -> list[Path]:
    """Draw the figures; returns their files. Without matplotlib, which the GPU suites leave out, there are none."""
    if find_spec("matplotlib") is None:
        return []
    from drafttrain.measure.plots import acceptance_plot, data_plot, speedup_plot, training_plot

    drawn = [
        acceptance_plot([*report["checkpoints"], *acceptance_entries(report)], folder / "acceptance.png"),
        speedup_plot(report["checkpoints"], folder / "speedup.png"),
        training_plot(metrics, folder / "training.png") if metrics is not None else None,
        data_plot((report["training"] or {}).get("data"), folder / "data.png"),
    ]
    return [path for path in drawn if path is not None]


def read_report(file: Path) -> Report:
    """A report of this or an earlier version. Raises UserError for anything else."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a report: {error}; name a {FILE} that drafttrain wrote") from error
    wanted = ("schema_version", "target", "drafter", "environment", "measure", "checkpoints", "best")
    if not isinstance(report, dict) or any(key not in report for key in wanted) or not report["checkpoints"]:
        raise UserError(f"{file} is not the report of a measurement; name a {FILE} that drafttrain wrote")
    if report["schema_version"] > SCHEMA_VERSION:
        raise UserError(f"{file}: schema_version {report['schema_version']} is newer than {SCHEMA_VERSION}; update drafttrain")
    return report


def rounded(value: Any) -> Any:
    """The value with every float rounded to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return value
