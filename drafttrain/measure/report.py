"""Writes and reads a measurement: report.json, report.md, report.html and the figures. Each file is written atomically.

report.html is one page that works offline.
"""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

import drafttrain
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, atomic_write_text
from drafttrain.measure import cells, engine_report
from drafttrain.measure.engine_report import acceptance_entries
from drafttrain.measure.flags import best, best_entry
from drafttrain.measure.markdown import headline, markdown, render, script_json
from drafttrain.measure.plots import CURVES, read_curves
from drafttrain.measure.sheet import write_sheet

SCHEMA_VERSION = 2
FILE = "report.json"

Report = dict[str, Any]
CHARTS = (
    (
        "acceptance",
        "Acceptance by position",
        "Share of drafts that are accepted, among those whose predecessors all were; with 95 % intervals.",
    ),
    ("categories", "Tau by category", "Tokens per forward pass of the target: measured, and predicted by teacher forcing."),
    (
        "speedup",
        "Speedup by batch size",
        "Time per token of plain decoding / of speculative decoding: median, minimum and maximum of the repeats.",
    ),
    (
        "engines",
        "Serving engines",
        "Tokens per second on the same prompts, with and without speculation, of our decoder and of serving engines.",
    ),
    ("temperature", "Speedup by temperature", "At the first batch size. Above temperature 0, sampling is lossless."),
    ("context", "Speedup by context length", "At the first batch size. Prompts of this many tokens, cut from long documents."),
    ("context-tau", "Tau by context length", "Tokens per forward pass of the target on the same prompts, with 95 % intervals."),
    (
        "step",
        "Cost of a decode step",
        "A speculative step compared with a plain step, in milliseconds, at the first batch size.",
    ),
    (
        "waterfall",
        "From ideal to measured speedup",
        "Tokens per step, divided by the cost of the step in plain steps, as each part of the cost is added.",
    ),
    *((f"training-{name}", title, "") for name, title in CURVES.items()),
)
SHOWN: tuple[str, ...] = (
    *("name", "tau", "alpha_by_position", "batch_size", "speedup", "speedup_min", "speedup_max", "floor_fraction", "samples"),
    *("draft_ms", "verify_ms", "commit_ms", "host_ms", "plain_step_ms"),
)
SLICE: tuple[str, ...] = (
    *(
        "by",
        "value",
        "prompts",
        "tau",
        "tau_interval",
        "expected_tau",
        "expected_tau_interval",
        "speedup",
        "speedup_min",
        "speedup_max",
    ),
    *("tokens_per_s", "baseline_tokens_per_s"),
)
ENGINE: tuple[str, ...] = (
    *("label", "tokens_per_s", "baseline_tokens_per_s", "speedup", "speedup_min", "speedup_max", "tau", "tau_here"),
    *("batch_size", "prompts", "exact_matches", "alpha_by_position"),
)


def report_of(
    body: dict[str, Any],
    target: dict[str, Any],
    drafter: dict[str, Any],
    environment: dict[str, Any],
    training: dict[str, Any] | None = None,
    chosen: str | None = None,
) -> Report:
    """The report (report.schema.json) of a measurement. body: the result of `measure_checkpoints`. chosen: the checkpoint that
    is the best by other figures; None: the best by these. What is decoded with other settings than the tuned ones is not best.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "target": target,
        "drafter": drafter,
        "environment": environment,
        "measure": body["measure"],
        "checkpoints": body["checkpoints"],
        "best": best([e for e in body["checkpoints"] if e.get("tuned", True) and chosen in (None, e["name"].split()[0])]),
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
    paths = [*figures, *write_sheet(folder, report), folder / "report.html", folder / "report.md", folder / FILE]
    atomic_write_text(folder / "report.html", page(rounded(report), metrics))
    atomic_write_text(folder / "report.md", markdown(report, [path.name for path in figures]))
    atomic_write_json(folder / FILE, rounded(report))
    return paths


def _figures(folder: Path, report: Report, metrics: Path | None) -> list[Path]:
    """Draw the figures; returns their files. Without matplotlib, which the GPU suites leave out, there are none."""
    if find_spec("matplotlib") is None:
        return []
    from drafttrain.measure.plots import acceptance_plot, data_plot, speedup_plot, training_plot

    figure_paths = [
        acceptance_plot([*report["checkpoints"], *acceptance_entries(report)], folder / "acceptance.png"),
        speedup_plot(report["checkpoints"], folder / "speedup.png"),
        training_plot(metrics, folder / "training.png", report["checkpoints"]) if metrics is not None else None,
        data_plot((report["training"] or {}).get("data"), folder / "data.png"),
    ]
    return [path for path in figure_paths if path is not None]


def read_report(file: Path) -> Report:
    """A report of this or an earlier version. Raises UserError for anything else."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a report: {error}; name a {FILE} that drafttrain wrote") from error
    required_keys = ("schema_version", "target", "drafter", "environment", "measure", "checkpoints", "best")
    if not isinstance(report, dict) or any(key not in report for key in required_keys) or not report["checkpoints"]:
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


def page(report: dict[str, Any], metrics: Path | None) -> str:
    """The whole page. metrics: the training run's metrics.jsonl."""
    title, _, summary = headline(report).removeprefix("# ").partition("\n\n")
    flags = [f"{entry['name']}: {flag}" for entry in report["checkpoints"] for flag in entry["flags"]]
    return render(
        "report.html",
        title=title,
        summary=f"{summary.replace('**', '')} drafttrain {drafttrain.__version__}.",
        cards=_cards(best_entry(report)),
        steps=_next_steps(report),
        notes=[*flags, *engine_report.flags(report), *report["measure"]["notes"]],
        charts=CHARTS,
        tables=_tables(report),
        data=script_json(_data(report, metrics)),
    )


def _cards(best: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, figure, explanation) of each headline figure."""
    tau_note = "tokens per pass of the target" if best["expected_tau"] is None else f"expected {cells.expected(best)}"
    cards = [("tau", cells.number(best["tau"]), tau_note)]
    if best["speedup"] is not None:
        low, high = (cells.number(best[key]) for key in ("speedup_min", "speedup_max"))
        cards.append(("speedup", f"{best['speedup']:.2f}x", f"repeats {low} to {high}, batch {best['batch_size']}"))
        plain, reference = (cells.number(best[key], 0) for key in ("baseline_tokens_per_s", "transformers_tokens_per_s"))
        cards.append(("tokens/s", cells.number(best["tokens_per_s"], 0), f"plain {plain}, transformers {reference}"))
    cards.append(("acceptance", cells.number(best["alpha"]), "accepted / offered drafts"))
    if best["exact_matches"] is not None:
        cards.append(("identical", cells.exact(best), "outputs identical to plain decoding"))
    if best["floor_fraction"] is not None:
        cards.append(("memory floor", cells.share(best["floor_fraction"]), "of a step: reading weights and cache once"))
    return cards


def _next_steps(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(purpose, command) of what comes next."""
    checkpoint, target = best_entry(report)["path"], report["target"]
    arguments = shlex.quote(f"checkpoint={checkpoint}")
    if target.get("name") != "embedded":
        arguments += " " + shlex.quote(f"target={target.get('path')}")
    stacks = report["drafter"].get("stacks")
    export = [(f"write it for {', '.join(stacks)}", f"drafttrain export {arguments} format=all out=DIR")] if stacks else []
    return [*export, ("measure it on your prompts", f"drafttrain measure {arguments} prompts=FILE")]


def _tables(report: dict[str, Any]) -> str:
    """The tables of report.md as HTML. HTML inside names and settings is escaped."""
    body = markdown(report, []).partition("\n## ")[2]
    return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(f"## {body}"))


def _data(report: dict[str, Any], metrics: Path | None) -> dict[str, Any]:
    entries = []
    for entry in report["checkpoints"]:
        fields = {key: entry.get(key) for key in SHOWN}
        entries.append(fields | {"slices": [{key: entry_slice.get(key) for key in SLICE} for entry_slice in entry["slices"]]})
    curves = {
        name: [{"name": label, "points": points} for label, points in series.items()]
        for name, series in read_curves(metrics, report["checkpoints"]).items()
    }
    engines = [{key: entry.get(key) for key in ENGINE} for entry in engine_report.engines_of(report)]
    return {"best": report["best"], "checkpoints": entries, "curves": curves, "engines": engines}
