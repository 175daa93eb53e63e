"""The console table at the end of a measurement."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from drafttrain.measure import cells

_COLUMNS = ("checkpoint", "tau", "expected", "alpha", "by position", "speedup", "tokens/s", "exact")


def console_table(report: dict[str, Any]) -> Table:
    """A row for each checkpoint, the best in bold. Expected tau is red if it is far from the measured tau."""
    first = report["checkpoints"][0]
    title = f"{report['drafter'].get('family', 'drafter')}, policy {first['policy']}, temperature {first['temperature']:g}, "
    title += f"batch {first['batch_size']}, {first['prompts']} prompts ({first['timed_prompts']} timed x {first['repeats']})"
    table = cells.console_table(title, _COLUMNS, left=("checkpoint", "tokens/s"))
    for entry in report["checkpoints"]:
        expected = Text(_expected(entry), style="red" if entry["expected_gap_flagged"] else "")
        table.add_row(
            entry["name"],
            cells.number(entry["tau"]),
            expected,
            cells.number(entry["alpha"]),
            cells.two_a_line(cells.alphas(entry)),
            cells.speedups(entry).replace(" ", "\n"),
            _rates(entry),
            cells.exact(entry),
            style="bold" if entry["name"] == report["best"] else "",
        )
    warnings = [f"{entry['name']}: {flag}" for entry in report["checkpoints"] for flag in entry["flags"]]
    if warnings:
        table.caption = Text("\n".join(f"! {w}" for w in warnings), style="yellow")
    return table


def _expected(entry: dict[str, Any]) -> str:
    """Expected tau with its interval on further lines, to keep the table within 80 columns."""
    value, _, interval = cells.expected(entry).partition(" ")
    low, _, high = interval.strip("()").partition(" to ")
    return f"{value}\n{low} to\n{high}" if interval else value


def _rates(entry: dict[str, Any]) -> str:
    names = {"tokens_per_s": "", "baseline_tokens_per_s": " plain", "transformers_tokens_per_s": " hf"}
    return "\n".join(f"{cells.number(entry[key], 0)}{label}" for key, label in names.items())
