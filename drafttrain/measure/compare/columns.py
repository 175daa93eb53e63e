"""The columns of a comparison: text for tables, figures for CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafttrain.measure import cells, engine_report
from drafttrain.measure.compare.ranking import Comparison
from drafttrain.measure.compare.runs import FLOPS, HOURS, TOKENS

HEADER = (
    *("", "run", "checkpoint", "family", "tau [95 %]", "alpha", "by position", "draft cost", "verify cost"),
    *("speedup [min-max]", "tokens/s", "exact", "parameters", "training tokens", "training", "frontier", "vs the first"),
)
FIGURES = (
    *("tau", "alpha", "draft_cost", "verify_cost", "speedup", "speedup_min", "speedup_max", "tokens_per_s"),
    *("baseline_tokens_per_s", "exact_matches", "prompts", "timed_prompts", "parameters"),
)
ENGINE = ("speedup", "tokens_per_s", "baseline_tokens_per_s", "tau")


def header(comparison: Comparison) -> list[str]:
    """`HEADER`, and a column for engines if a run measured any."""
    return [*HEADER, *(["engines"] if _with_engines(comparison) else [])]


def cell_rows(comparison: Comparison) -> list[list[str]]:
    """The cells of each row, under `header`."""
    with_engines = _with_engines(comparison)
    rows = range(len(comparison.rows))
    return [_cells(comparison, i) + ([engines_text(comparison, i) or cells.MISSING] if with_engines else []) for i in rows]


def engines_of(comparison: Comparison, i: int) -> list[dict[str, Any]]:
    """The engines of row i. Only a run's best checkpoint has them."""
    report, name = comparison.rows[i].run.report, comparison.rows[i].entry["name"]
    return engine_report.engines_of(report) if name == report["best"] else []


def engines_text(comparison: Comparison, i: int) -> str:
    return "; ".join(engine_report.short(entry) for entry in engines_of(comparison, i))


def _with_engines(comparison: Comparison) -> bool:
    return any(engines_of(comparison, i) for i in range(len(comparison.rows)))


def _cells(comparison: Comparison, i: int) -> list[str]:
    row = comparison.rows[i]
    entry = row.entry
    return [
        str(i + 1),
        row.label,
        entry["name"],
        row.family,
        tau_text(comparison, i),
        cells.number(entry["alpha"]),
        cells.alphas(entry),
        cells.number(entry["draft_cost"]),
        cells.number(entry["verify_cost"]),
        cells.speedups(entry),
        cells.number(entry["tokens_per_s"], 0),
        cells.exact(entry),
        cells.count(entry["parameters"]),
        cells.count(row.training.get("tokens")),
        cost_text(comparison, i),
        "yes" if i in comparison.frontier else "",
        comparison.against_first(i),
    ]


def tau_text(comparison: Comparison, i: int) -> str:
    """`2.23 [2.11-2.36]`; without the interval where the report has no figures by prompt."""
    text, interval = cells.number(comparison.rows[i].entry["tau"]), comparison.tau_intervals[i]
    return text if interval is None else f"{text} [{interval.low:.2f}-{interval.high:.2f}]"


def cost_text(comparison: Comparison, i: int) -> str:
    """`1.2e15 FLOP, 0.06 CPU h`: training cost, as far as it is known."""
    row = comparison.rows[i]
    flops, hours = row.cost(FLOPS), row.cost(HOURS)
    parts = [] if flops is None else [f"{flops:.2g} FLOP"]
    if hours is not None:
        device = {"cuda": "GPU ", "cpu": "CPU "}.get(row.training.get("device") or "", "")
        parts.append(f"{hours:.3g} {device}h")
    return ", ".join(parts) or cells.MISSING


def varied_text(comparison: Comparison, i: int, most: int = 4) -> str:
    """`train.lr=0.001`: settings in which the runs differ."""
    assignments = [f"{key}={value}" for key, value in comparison.rows[i].varied.items()]
    return ", ".join(assignments[:most]) + (f" and {len(assignments) - most} more" if len(assignments) > most else "")


def pair_cells(comparison: Comparison) -> list[list[str]]:
    """The cells of each pair: figure, first, second, prompts, difference, verdict."""
    lines = []
    for pair in comparison.pairs:
        difference = cells.MISSING
        if pair.difference is not None and pair.interval is not None:
            difference = f"{pair.difference:+.3f} [{pair.interval.low:+.3f}, {pair.interval.high:+.3f}]"
        first, second = (comparison.rows[k].label for k in (pair.first, pair.second))
        lines.append([pair.figure, first, second, str(pair.prompts), difference, pair.verdict(comparison.level)])
    return lines


def figure_rows(comparison: Comparison) -> tuple[list[str], list[list[Any]]]:
    """(header, rows) of figures, for a CSV file."""
    varied = list(dict.fromkeys(key for row in comparison.rows for key in row.varied))
    depth = max((len(row.entry["alpha_by_position"]) for row in comparison.rows), default=0)
    header = ["rank", "run", "where", "checkpoint", "family", "policy", "temperature", "batch_size", *FIGURES]
    header += ["tau_low", "tau_high", *(f"alpha_{k + 1}" for k in range(depth)), "training_tokens", "training_flops"]
    header += ["training_hours", "frontier", "against_the_first", *varied]
    rows = range(len(comparison.rows))
    engines = list(dict.fromkeys(entry["engine"] for i in rows for entry in engines_of(comparison, i)))
    header += [f"{name}_{key}" for name in engines for key in ENGINE]
    return header, [_figures(comparison, i, depth, varied) + _engine_figures(comparison, i, engines) for i in rows]


def _engine_figures(comparison: Comparison, i: int, engines: Sequence[str]) -> list[Any]:
    by_engine = {entry["engine"]: entry for entry in engines_of(comparison, i)}
    return [by_engine.get(name, {}).get(key) for name in engines for key in ENGINE]


def _figures(comparison: Comparison, i: int, depth: int, varied: Sequence[str]) -> list[Any]:
    row, interval = comparison.rows[i], comparison.tau_intervals[i]
    entry, alphas = row.entry, [a[0] for a in row.entry["alpha_by_position"]]
    line = [i + 1, row.label, row.run.where, entry["name"], row.family, entry["policy"], entry["temperature"]]
    line += [entry["batch_size"], *(entry.get(key) for key in FIGURES)]
    line += [None, None] if interval is None else [round(interval.low, 6), round(interval.high, 6)]
    line += alphas + [None] * (depth - len(alphas))
    line += [row.cost(TOKENS), row.cost(FLOPS), row.cost(HOURS), int(i in comparison.frontier), comparison.against_first(i)]
    return line + [row.varied.get(key) for key in varied]
