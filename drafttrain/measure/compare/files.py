"""Writes a comparison as compare.csv, pairs.csv, compare.md and compare.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafttrain.core.files import atomic_write_text
from drafttrain.measure import cells
from drafttrain.measure.compare.columns import cell_rows, figure_rows, header, pair_cells, varied_text
from drafttrain.measure.compare.page import page
from drafttrain.measure.compare.ranking import Comparison
from drafttrain.measure.compare.significance import Pair

PAIRS = ("figure", "first", "second", "prompts", "difference", "low", "high", "p", "p_corrected", "verdict")


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
