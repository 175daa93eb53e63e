"""Report.html: the measurement as one page that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

import drafttrain
from drafttrain.measure import cells, engine_report
from drafttrain.measure.curves import CURVES, read_curves
from drafttrain.measure.html import render, script_json
from drafttrain.measure.markdown import headline, markdown

CHARTS = (
    ("acceptance", "Acceptance by position", "Of the drafts whose predecessors were all accepted; with 95 % intervals."),
    ("categories", "Tau by category", "Tokens that one forward of the target gives, measured and as training foretold."),
    (
        "speedup",
        "Speedup by batch size",
        "Time per token of plain decoding over that of speculative decoding: median, least, greatest.",
    ),
    (
        "engines",
        "Engines beside it",
        "Tokens a second on the same prompts, with and without speculation, of our decoder and of serving engines.",
    ),
    ("temperature", "Speedup by temperature", "At the first batch size, sampled without loss above 0."),
    ("context", "Speedup by context length", "At the first batch size, of prompts of so many tokens, cut from long documents."),
    ("step", "A step", "What one verification costs beside a plain step, in milliseconds, at the first batch size."),
    (
        "waterfall",
        "From ideal to measured",
        "What is left of the tokens of a step as each part of it is paid for, in plain steps.",
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
    *("batch_size", "prompts", "exact_matches"),
)


def page(report: dict[str, Any], metrics: Path | None) -> str:
    """The whole page. metrics: the training run's metrics.jsonl."""
    title, _, said = headline(report).removeprefix("# ").partition("\n\n")
    flags = [f"{entry['name']}: {flag}" for entry in report["checkpoints"] for flag in entry["flags"]]
    return render(
        "report.html",
        title=title,
        said=f"{said.replace('**', '')} drafttrain {drafttrain.__version__}.",
        cards=_cards(next(entry for entry in report["checkpoints"] if entry["name"] == report["best"])),
        notes=[*flags, *engine_report.flags(report), *report["measure"]["notes"]],
        charts=CHARTS,
        tables=_tables(report),
        data=script_json(_data(report, metrics)),
    )


def _cards(best: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, figure, what stands beside it)."""
    found = [("tau", cells.number(best["tau"]), f"expected {cells.expected(best)}")]
    if best["speedup"] is not None:
        low, high = (cells.number(best[key]) for key in ("speedup_min", "speedup_max"))
        found.append(("speedup", f"{best['speedup']:.2f}x", f"{low} to {high}, batch {best['batch_size']}"))
        plain, reference = (cells.number(best[key], 0) for key in ("baseline_tokens_per_s", "transformers_tokens_per_s"))
        found.append(("tokens/s", cells.number(best["tokens_per_s"], 0), f"plain {plain}, transformers {reference}"))
    found.append(("acceptance", cells.number(best["alpha"]), "of the drafts on the verified path"))
    if best["exact_matches"] is not None:
        found.append(("identical", cells.exact(best), "outputs, to plain decoding"))
    if best["floor_fraction"] is not None:
        found.append(("floor", cells.share(best["floor_fraction"]), "of a step, for memory alone"))
    return found


def _tables(report: dict[str, Any]) -> str:
    """report.md's tables as HTML; what is HTML in a name or a setting stays text."""
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
    engines = [{key: entry[key] for key in ENGINE} for entry in engine_report.engines_of(report)]
    return {"best": report["best"], "checkpoints": entries, "curves": curves, "engines": engines}
