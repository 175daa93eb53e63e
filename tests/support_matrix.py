"""The tables in docs/export.md: `python -m tests.support_matrix docs/export.md` writes them.

The support matrix comes from `drafttrain/export/table.py`, the engines' results from engines.json next to the page, which
`make test-engines` writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from drafttrain.engines.process import ENGINES
from drafttrain.export.format import StackRow
from drafttrain.export.serve import STACKS
from drafttrain.export.table import TABLE, loads

BEGIN, END = "<!-- matrix: written by `make export-matrix` -->", "<!-- /matrix -->"
BEGIN_ENGINES, END_ENGINES = "<!-- engines: written by `make test-engines` -->", "<!-- /engines -->"
FACTS = "engines.json"
RUN_HEAD = ["engine", "`format=`", "drafters and their accepted drafts"]
EXPLAINED = {name: stack for name, stack in STACKS.items() if name != "official"}  # few look for the authors' code
BROKEN_HEAD = ["broken", "drafter", "engine", "texts still the target's", "accepted here", "by the engine"]


def matrix(facts: dict[str, Any]) -> str:
    """Markdown: a table of layouts by family and stack, which of them may be quantised, and the reasons for empty cells."""
    ran = {(run["family"], run["stack"]) for run in facts["runs"].values()}
    families = [family for family in TABLE if loads(family)]
    rows = [["", *(stack.name for stack in STACKS.values())]]
    for family in families:
        cells = ((TABLE[family][stack], (family, stack) in ran) for stack in STACKS)
        rows.append([f"`{family}`", *(_cell(cell, run) for cell, run in cells)])
    return "\n".join(
        [
            _table(rows),
            "",
            _quantised(),
            "",
            "Why a cell is empty (`export` says it of the authors' code too):",
            "",
            *_reasons(),
        ]
    )


def engines(facts: dict[str, Any]) -> str:
    """Markdown: how many drafts engines accepted, of correct exports and of broken ones."""
    drafters: dict[tuple[str, str], list[str]] = {}
    for run in facts["runs"].values():
        same = run["ours"] == run["theirs"]
        count = run["ours"] if same else f"{run['ours']} here, {run['theirs']} by the engine"
        drafters.setdefault((_engine(run), f"`{run['stack']}`"), []).append(f"`{run['family']}`{_norms(run)} {count}")
    runs = [RUN_HEAD, *([*key, ", ".join(texts)] for key, texts in drafters.items())]
    prompts = ", ".join(str(count) for count in sorted({run["prompts"] for run in facts["runs"].values()}))
    broken = [BROKEN_HEAD]
    for name, run in facts["broken"].items():
        texts = f"{run['same_texts']} of {run['prompts']}"
        broken.append([name, f"`{run['family']}`", _engine(run), texts, str(run["ours"]), str(run["theirs"])])
    said = f"Accepted drafts of {prompts} prompts; one figure: the engine accepts as many as our decoder."
    return f"{said}\n\n{_table(runs)}\n\nBroken on purpose:\n\n{_table(broken)}"


def renewed(page: str, facts: dict[str, Any]) -> str:
    """The page with new tables between their marks."""
    page = _between(page, BEGIN, END, matrix(facts))
    return _between(page, BEGIN_ENGINES, END_ENGINES, engines(facts))


def facts_next_to(page: Path) -> dict[str, Any]:
    """The engines' results, from the file next to the page."""
    facts: dict[str, Any] = json.loads((page.parent / FACTS).read_text(encoding="utf-8"))
    return facts


def _cell(row: StackRow | str, run: bool) -> str:
    if isinstance(row, str):
        return "–"
    return f"**{row.format.name}**" if run else row.format.name


def _norms(run: dict[str, Any]) -> str:
    return f" ({run['options']})" if run.get("options") else ""


def _engine(run: dict[str, Any]) -> str:
    name, version = next(iter(run["versions"].items()))
    label = ENGINES[run["engine"]].label
    return f"{label} {version}" if name in (run["engine"], run["engine"] + "-genai") else f"{label} ({name} {version})"


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def _between(page: str, begin: str, end: str, text: str) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def _quantised() -> str:
    """A line of the families that each stack loads with quantised weights."""
    families = {
        stack.name: [f"`{family}`" for family in TABLE if isinstance(row := TABLE[family][name], StackRow) and row.quantised]
        for name, stack in STACKS.items()
    }
    stacks = "; ".join(f"{name} {', '.join(names)}" for name, names in families.items() if names)
    return f"With [quantised weights](#quantised-weights): {stacks}."


def _reasons() -> list[str]:
    """A line of the stacks' usual reasons, then those of families with others; stacks and families with the same are joined."""
    families: dict[str, list[str]] = {}
    for family, cells in TABLE.items():
        named = ((stack, cells[stack]) for stack in EXPLAINED)
        own = {stack: cell for stack, cell in named if isinstance(cell, str) and cell != STACKS[stack].usual}
        if own:
            families.setdefault(_by_reason(own), []).append(f"`{family}`")
    usual = f"- Usually: {_by_reason({stack: row.usual for stack, row in EXPLAINED.items()})}."
    return [usual, *(f"- {', '.join(names)}: {why}." for why, names in families.items())]


def _by_reason(reasons: dict[str, str]) -> str:
    stacks: dict[str, list[str]] = {}
    for stack, why in reasons.items():
        stacks.setdefault(why, []).append(STACKS[stack].name)
    named = ((why, "every stack" if len(names) == len(EXPLAINED) else ", ".join(names)) for why, names in stacks.items())
    return "; ".join(f"{names}: {why}" for why, names in named)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text(encoding="utf-8"), facts_next_to(file)), encoding="utf-8")
