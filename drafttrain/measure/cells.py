"""Figures as short text, for the console and for report.md."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from drafttrain.core.intervals import with_interval

Entry = dict[str, Any]

MISSING = "-"


def rows(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def csv_text(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """The text of a CSV file. None becomes an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if value is None else value for value in line] for line in lines)
    return text.getvalue()


def console_table(title: str, columns: Iterable[str], left: Sequence[str], space: int = 1) -> Table:
    """An empty table for the console. left: the columns that are aligned left. space: between columns, in characters."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, space, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def two_a_line(text: str, most: int | None = None) -> str:
    """The words, two on each line; after `most` words follows an ellipsis. It keeps tables narrow."""
    words = text.split()
    lines = [" ".join(words[i : i + 2]) for i in range(0, len(words[:most]), 2)]
    return "\n".join([*lines, *(["..."] if len(words[:most]) < len(words) else [])])


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"


def count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def tau(entry: Entry, key: str = "tau") -> str:
    """`1.52 (1.38 to 1.66)`: a tau, with its interval if it has one (old reports have none)."""
    interval = entry.get(f"{key}_interval")
    return (
        number(entry[key]) if entry[key] is None or interval is None else with_interval(entry[key], (interval[0], interval[1]))
    )


def expected(entry: Entry) -> str:
    return tau(entry, "expected_tau")


def alphas(entry: Entry, key: str = "alpha_by_position") -> str:
    """Acceptance by position: `0.71 0.66 0.70`. Older reports have none of engines."""
    return " ".join(f"{a[0]:.2f}" for a in entry.get(key) or []) or MISSING


def speedups(entry: Entry) -> str:
    """`1.62x [1.50-1.70]`."""
    if entry["speedup"] is None:
        return MISSING
    return f"{entry['speedup']:.2f}x [{entry['speedup_min']:.2f}-{entry['speedup_max']:.2f}]"


def rates(entry: Entry) -> str:
    """Tokens per second: speculative / plain / transformers; without transformers where it was not measured at all."""
    names = ("tokens_per_s", "baseline_tokens_per_s", "transformers_tokens_per_s")
    return " / ".join(number(entry[name], 0) for name in names if name in entry)


def with_plain(entry: Entry, key: str) -> str:
    """`12.40 (31.00)`: a figure, and in brackets that of plain decoding."""
    return f"{number(entry.get(key))} ({number(entry.get(f'baseline_{key}'))})"


def exact(entry: Entry) -> str:
    """`40/40`: outputs identical to those of plain decoding."""
    matches = entry.get("exact_matches")
    return MISSING if matches is None else f"{matches}/{entry['prompts']}"
