"""Figures as short text, the same on the console and in report.md."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from drafttrain.core.intervals import with_interval

Entry = dict[str, Any]

MISSING = "-"


def rows(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def csv_text(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A CSV file's text; what is missing is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if value is None else value for value in line] for line in lines)
    return text.getvalue()


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"


def count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def expected(entry: Entry) -> str:
    """`1.52 (1.38 to 1.66)`: expected tau with its interval, where it has one (reports of earlier versions do not)."""
    interval = entry.get("expected_tau_interval")
    if entry["expected_tau"] is None or interval is None:
        return number(entry["expected_tau"])
    return with_interval(entry["expected_tau"], (interval[0], interval[1]))


def alphas(entry: Entry) -> str:
    """Acceptance by position: `0.71 0.66 0.70`."""
    return " ".join(f"{a[0]:.2f}" for a in entry["alpha_by_position"]) or MISSING


def speedups(entry: Entry) -> str:
    """`1.62x [1.50-1.70]`."""
    if entry["speedup"] is None:
        return MISSING
    return f"{entry['speedup']:.2f}x [{entry['speedup_min']:.2f}-{entry['speedup_max']:.2f}]"


def rates(entry: Entry) -> str:
    """Tokens per second: speculative / plain / transformers."""
    names = ("tokens_per_s", "baseline_tokens_per_s", "transformers_tokens_per_s")
    return " / ".join(number(entry[name], 0) for name in names)


def exact(entry: Entry) -> str:
    """`40/40`: greedy outputs identical to plain decoding's."""
    matches = entry.get("exact_matches")
    return MISSING if matches is None else f"{matches}/{entry['prompts']}"
