"""report.html: the measurement as one page that works offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

import drafttrain
from drafttrain.measure import cells, engine_report
from drafttrain.measure.curves import CURVES, read_curves
from drafttrain.measure.flags import best_entry
from drafttrain.measure.html import render, script_json
from drafttrain.measure.markdown import headline, markdown

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
    *("by", "value", "prompts", "tau", "expected_tau", "expected_tau_interval", "speedup", "speedup_min", "speedup_max"),
    *("tokens_per_s", "baseline_tokens_per_s"),
)
ENGINE: tuple[str, ...] = (
    *("label", "tokens_per_s", "baseline_tokens_per_s", "speedup", "speedup_min", "speedup_max", "tau", "tau_here"),
    *("batch_size", "prompts", "exact_matches", "alpha_by_position"),
)


def page(report: dict[str, Any], metrics: Path | None) -> str:
    """The whole page. metrics: the training run's metrics.jsonl."""
    title, _, summary = headline(report).removeprefix("# ").partition("\n\n")
    flags = [f"{entry['name']}: {flag}" for entry in report["checkpoints"] for flag in entry["flags"]]
    return render(
        "report.html",
        title=title,
        summary=f"{summary.replace('**', '')} drafttrain {drafttrain.__version__}.",
        cards=_cards(best_entry(report)),
        notes=[*flags, *engine_report.flags(report), *report["measure"]["notes"]],
        charts=CHARTS,
        tables=_tables(report),
        data=script_json(_data(report, metrics)),
    )


def _cards(best: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, figure, explanation) of each headline figure."""
    found = [("tau", cells.number(best["tau"]), f"expected {cells.expected(best)}")]
    if best["speedup"] is not None:
        low, high = (cells.number(best[key]) for key in ("speedup_min", "speedup_max"))
        found.append(("speedup", f"{best['speedup']:.2f}x", f"repeats {low} to {high}, batch {best['batch_size']}"))
        plain, reference = (cells.number(best[key], 0) for key in ("baseline_tokens_per_s", "transformers_tokens_per_s"))
        found.append(("tokens/s", cells.number(best["tokens_per_s"], 0), f"plain {plain}, transformers {reference}"))
    found.append(("acceptance", cells.number(best["alpha"]), "accepted / offered drafts"))
    if best["exact_matches"] is not None:
        found.append(("identical", cells.exact(best), "outputs identical to plain decoding"))
    if best["floor_fraction"] is not None:
        found.append(("memory floor", cells.share(best["floor_fraction"]), "of a step: reading weights and cache once"))
    return found


def _tables(report: dict[str, Any]) -> str:
    """The tables of report.md as HTML. HTML inside names and settings is escaped."""
    body = markdown(report, []).partition("\n## ")[2]
    return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(f"## {body}"))


def _data(report: dict[str, Any], metrics: Path | None) -> dict[str, Any]:
    entries = []
    for entry in report["checkpoints"]:
        kept = {key: entry.get(key) for key in SHOWN}
        entries.append(kept | {"slices": [{key: part.get(key) for key in SLICE} for part in entry["slices"]]})
    curves = {
        name: [{"name": label, "points": points} for label, points in series.items()]
        for name, series in read_curves(metrics).items()
    }
    engines = [{key: entry.get(key) for key in ENGINE} for entry in engine_report.engines_of(report)]
    return {"best": report["best"], "checkpoints": entries, "curves": curves, "engines": engines}
