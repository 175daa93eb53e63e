"""The support matrix of docs/export.md, from the table: `python -m drafttrain.export.matrix docs/export.md` renews it there."""

from __future__ import annotations

import sys
from pathlib import Path

from drafttrain.export.table import STACKS, TABLE, Layout, loads

BEGIN, END = "<!-- matrix: written by `make export-matrix` -->", "<!-- /matrix -->"


def matrix() -> str:
    """Markdown: a table of layouts by family and stack, and under it the reason of every empty cell."""
    families = [family for family in TABLE if loads(family)]
    rows = [["", *STACKS.values()], ["---"] * (len(STACKS) + 1)]
    for family in families:
        cells = (TABLE[family][stack] for stack in STACKS)
        rows.append([f"`{family}`", *(cell.name if isinstance(cell, Layout) else "–" for cell in cells)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", "Why not:", "", *_reasons()])


def _reasons() -> list[str]:
    """One line per family; stacks of one reason together."""
    lines = []
    for family, cells in TABLE.items():
        by_reason: dict[str, list[str]] = {}
        for stack, cell in cells.items():
            if isinstance(cell, str):
                by_reason.setdefault(cell, []).append(STACKS[stack])
        parts = [
            f"{'every stack' if len(stacks) == len(STACKS) else ', '.join(stacks)}: {why}" for why, stacks in by_reason.items()
        ]
        lines.append(f"- `{family}`: {'; '.join(parts)}.")
    return lines


def renewed(page: str) -> str:
    """The page with the matrix of now between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{matrix()}\n{END}{after}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text(encoding="utf-8")), encoding="utf-8")
