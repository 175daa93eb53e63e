"""The cost of drafting of every family, as a multiple of a plain decode step (c_d).

    python -m benchmarks.drafters [--only NAME ...] [--repeats 7] [--steps 40] [--nodes 18] [--json FILE]

It uses the embedded target, untrained drafters of the recipes' shapes, batch 1 and greedy decoding. Trees are static, of
--nodes drafts; families that draft chains draft chains. The weights do not matter for the cost of a proposal, except that a
trained drafter has more pending positions: each step observes one accepted position here, and the report of a trained drafter
two or three.

In every repeat each family decodes --steps steps in turn, and so does plain decoding; a repeat's figure is the median of its
steps. A line shows the median of the repeats' ratios.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import WIDTH, Line, interleaved, ratio, write_record
from benchmarks.gpu.drafting import likely
from drafttrain.cli.quiet import quiet
from drafttrain.core.sampling import Sampling
from drafttrain.data.prompts import load_prompts
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.drafters import families
from drafttrain.measure.cases import encode_cases
from drafttrain.model.drafter import Drafter
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target


@dataclass(frozen=True, slots=True)
class Case:
    """One drafter. Families that are not here have nothing to compute for a draft."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    depth: int = 0  # of a static tree; 0: the options say how it drafts
    at_most: float | None = None  # goal for c_d


CASES = {
    "eagle": Case("eagle", {"draft_length": 5}, 5, 1.7),
    "eagle2": Case("eagle", {"draft_length": 5, "tree": "dynamic", "width": 4, "nodes": 18}),
    "eagle3": Case("eagle3", {"draft_length": 5, "fc_norm": True, "norm_output": True}, 5, 1.4),
    "mtp": Case("mtp", {"draft_length": 5}, 5, 1.7),
    "peagle": Case("peagle", {"draft_length": 5}, 5),
    "hydra": Case("hydra", {"layers": 2}, 4, 0.8),
    "hydra++": Case("hydra", {"layers": 2, "prefix_layer": True}, 4),
    "redrafter": Case("redrafter", {"width": 5, "nodes": 18}, at_most=0.8),
    "mlp_speculator": Case("mlp_speculator", {"n_predict": 4}, 4),
    "medusa": Case("medusa", {"heads": 4}, 4),
    "draft_model": Case("draft_model", {"draft_length": 4}, at_most=0.9),
    "pard": Case("pard", {"tree": "chain"}),
    "uno": Case("uno", {"lora_rank": 32}),
    "early_exit": Case("early_exit", {"draft_length": 4, "adapter": True}),
    **{name: Case(name, {"tree": "chain"}) for name in ("dflash", "dflash2", "dspark", "xpress", "lilicorr")},
}


class Drafting:
    """One request that is decoded step after step."""

    def __init__(self, target: Any, drafter: Drafter | None, prompts: list[list[int]], steps: int) -> None:
        self.steps, self.prompts, self.drafter = steps, prompts, drafter
        room = 2 + steps * (1 + (drafter.draft_length if drafter else 0))
        self.decoder = Decoder(target, drafter, "greedy", Sampling(), frozenset(), room)
        self.next = 0

    def seconds(self, part: Callable[[list[float]], float]) -> float:
        """The median of a step's part, from the times at which the parts of the step began and ended."""
        prompt = self.prompts[self.next % len(self.prompts)]
        self.next += 1
        request = self.decoder.request(prompt)
        session, found = Session(self.decoder, 1, self.decoder.positions(request)), list[float]()
        session.submit(request)
        for _ in range(self.steps):
            session.step()
            found.append(part(session.decode_step.marks))
        return median(found)


def plain_step(marks: list[float]) -> float:
    """Seconds of a whole step."""
    return marks[-1] - marks[0]


def draft(marks: list[float]) -> float:
    """Seconds of a step's proposal."""
    return marks[1] - marks[0]


def built(case: Case, target: Any, nodes: int) -> Drafter:
    """The untrained drafter, with a static tree where its case says so."""
    family, options = families()[case.family], dict(case.options)
    if case.depth:
        options |= {"tree": "static", "paths": likely(case.depth, nodes)}
    torch.manual_seed(0)
    return family.build(family.options(**options), target).eval().requires_grad_(False)


def measured(asked: argparse.Namespace, console: Console) -> dict[str, Line]:
    loaded = load_target(TargetOptions(name="embedded"))
    cases, _ = encode_cases(load_prompts("embedded", None), loaded.tokenizer, 512)
    prompts = [case.tokens for case in cases if len(case.tokens) < 300]
    names = [name for name in CASES if not asked.only or name in asked.only]
    drafters = {name: built(CASES[name], loaded.target, asked.nodes) for name in names}
    runs = [partial(Drafting(loaded.target, None, prompts, asked.steps).seconds, plain_step)]
    runs += [partial(Drafting(loaded.target, drafters[name], prompts, asked.steps).seconds, draft) for name in names]
    plain, *columns = interleaved(asked.repeats, *runs)
    console.print(f"plain step: {1e6 * median(plain):.0f} us", style="dim")
    return {
        name: ratio(name, column, plain, "{:.2e} s of {:.2e} s", at_most=CASES[name].at_most)
        for name, column in zip(names, columns, strict=True)
    }


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", default=[])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=18)
    parser.add_argument("--json", type=Path)
    asked, console = parser.parse_args(given), Console(width=WIDTH)
    if min(asked.repeats, asked.steps, asked.nodes) < 1:
        parser.error("--repeats, --steps and --nodes must be 1 or more")
    quiet()
    found = measured(asked, console)
    table = Table("drafter", "c_d", "of repeats", "goal", "draft of plain step", box=None, width=WIDTH)
    for name, line in found.items():
        table.add_row(name, f"{line.value:.2f}", f"{line.low:.2f}-{line.high:.2f}", line.goal, line.figures)
    console.print(table)
    if asked.json:
        write_record(asked.json, torch.device("cpu"), lines={name: {"c_d": line.value} for name, line in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
