"""compare.html: the comparison as one page that works offline."""

from __future__ import annotations

from typing import Any

import drafttrain
from drafttrain.measure import cells
from drafttrain.measure.compare.columns import cell_rows, cost_text, header, pair_cells, varied_text
from drafttrain.measure.compare.ranking import UNITS, Comparison
from drafttrain.measure.compare.scatter import Scatter, scatter
from drafttrain.measure.html import render

SIZES = {"wide": (720, 400), "narrow": (340, 340)}


def page(comparison: Comparison, command: str) -> str:
    """The whole page. command: the command line to show on it."""
    first = comparison.rows[0]
    return render(
        "compare.html",
        title=f"{len(comparison.rows)} runs by {comparison.sort}",
        version=drafttrain.__version__,
        command=command,
        entry=first.entry,
        target=first.run.report["target"],
        header=header(comparison),
        rows=cell_rows(comparison),
        varied=[varied_text(comparison, i, 99) for i in range(len(comparison.rows))],
        frontier=comparison.frontier,
        plots=plots(comparison),
        unit=UNITS[comparison.cost],
        pairs=pair_cells(comparison),
        tests=tests(comparison),
        level=comparison.level,
        notes=comparison.notes,
    )


def tests(comparison: Comparison) -> int:
    """Number of pairs tested per figure, which Holm's correction takes into account."""
    return max((sum(p.figure == name and p.p is not None for p in comparison.pairs) for name in ("speedup", "tau")), default=0)


def plots(comparison: Comparison) -> dict[str, Scatter]:
    """The scatter plots of speedup against training cost, for wide and narrow screens; none if no run has both."""
    points = comparison.points()
    if not points:
        return {}
    marks: list[dict[str, Any]] = []
    for i, cost, speed in points:
        entry = comparison.rows[i].entry
        about = f"{comparison.rows[i].label}: {cells.speedups(entry)}, tau {cells.number(entry['tau'])}"
        about += f", {cost_text(comparison, i)}"
        marks.append(
            {
                "rank": i + 1,
                "cost": cost,
                "speed": speed,
                "low": entry["speedup_min"],
                "high": entry["speedup_max"],
                "about": about,
                "ahead": i in comparison.frontier,
            }
        )
    return {name: scatter(marks, width, height) for name, (width, height) in SIZES.items()}
