"""The table of docs/targets.md: `python -m tests.targets docs/targets.md` writes it.

Each row comes from a tiny random model of the architecture, loaded as `drafttrain` loads a target: its runner, its probe, its
refusals, and whether the tests' stand-in for CUDA graphs takes its passes, not a list kept by hand. The last column adds the
notes of `tests.architectures`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.decoding.graph_runner import reason_of
from drafttrain.targets.experts import experts_of, find_experts
from drafttrain.targets.fast import FastTarget, why_not, why_whole
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import RecomputedTarget
from drafttrain.targets.probe import InexactError, why_not_captured
from tests.architectures import ROWS, Architecture, model_of
from tests.recorder import install

BEGIN, END = "<!-- targets: written by `make targets` -->", "<!-- /targets -->"
HEAD = ["architecture", "transformers class", "runner", "drafts", "CUDA graphs", "tensor parallel", "expert parallel"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What loading a target of one architecture showed."""

    name: str
    kind: str  # transformers' class
    refused: str | None = None  # why it is no target
    runner: str = ""
    slow: str | None = None  # why the fast runner does not serve it
    anew: str | None = None  # why every step computes the text anew
    trees: bool = False
    graphs: str = ""
    uncaptured: str | None = None  # why no CUDA graph can hold its decode steps
    whole: str | None = None  # why its blocks are not split over processes
    experts: bool = False  # whether processes can share its experts
    shown: str = ""

    @property
    def cells(self) -> list[str]:
        """Its row of the table."""
        start = [self.name, f"`{self.kind}`"]
        if self.refused is not None:
            return [*start, "refused", *["-"] * 4]
        shared = ["yes" if can else "no" for can in (self.whole is None, self.experts)]
        return [*start, self.runner, "trees" if self.trees else "chains", self.graphs, *shared]


def facts_of(row: Architecture) -> Facts:
    """Load a tiny model of the architecture and note what came of it."""
    model: Any = model_of(row.name)
    kind, slow = type(model).__name__, why_not(model)
    try:
        target = (HFTarget if slow else FastTarget)(model)
    except InexactError as error:
        why = str(error).partition(";")[0]
        trees = RecomputedTarget(model_of(row.name), why=why).trees
        return Facts(row.name, kind, None, "recomputed", slow, why, trees, "no", None, slow, False, row.shown)
    except UserError as error:
        return Facts(row.name, kind, str(error), shown=row.shown)
    uncaptured = refusal(target)
    graphs = "no" if uncaptured else "asked at load" if find_experts(model) else "yes"
    whole = slow if slow else why_whole(model)
    name = "fast" if isinstance(target, FastTarget) else "transformers"
    shared = experts_of(model) > 0
    return Facts(row.name, kind, None, name, slow, None, target.trees, graphs, uncaptured, whole, shared, row.shown)


def refusal(target: HFTarget) -> str | None:
    """Why the tests' stand-in for CUDA graphs refuses the target's passes; None: it does not, and replays them right."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch.setattr)
        try:
            return why_not_captured(target)
        except AssertionError as error:
            return reason_of(error)


def table(rows: list[Facts]) -> str:
    """Markdown: the table, the reasons of what is refused, and the notes."""
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells for row in rows)]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    refused = [f"- {row.name}: {row.refused}." for row in rows if row.refused is not None]
    notes = [f"- {row.name}: {row.shown}." for row in rows if row.shown]
    parts = [text, "Refused, as the error says:", "\n".join(refused)]
    if anew := [f"- {row.name}: {row.anew}." for row in rows if row.anew]:
        parts += ["Recomputed (every step computes the text anew, without a cache: exact, and slow), because:", "\n".join(anew)]
    if uncaptured := [f"- {row.name}: {row.uncaptured}." for row in rows if row.uncaptured]:
        parts += ["Not captured, because:", "\n".join(uncaptured)]
    parts += ["Notes:", "\n".join(notes)] if notes else []
    return "\n\n".join(parts)


def renewed(page: str, rows: list[Facts]) -> str:
    """The page with a new table between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    page = Path(sys.argv[1])
    torch.set_num_threads(1)  # the models are too small for more
    page.write_text(renewed(page.read_text(encoding="utf-8"), [facts_of(row) for row in ROWS]), encoding="utf-8")


if __name__ == "__main__":
    main()
