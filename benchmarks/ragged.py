"""What cutting each row of a batch at its own length would save, compared with one length for all rows of a step.

    python -m benchmarks.ragged --checkpoint DIR [--batches 4 16] [--prompts 48] [--seconds] [--json FILE]

A drafter of the embedded target with a confidence in each draft (DSpark, or `drafter.confidence=top1`) decodes the prompts
greedily, whole chains. Every step's confidences and accepted drafts are kept. Then both cuts are applied to the same steps:

    even     the first d drafts of every row
    ragged   the drafts of the whole step with the greatest products of confidences, as many as `even` verifies (D-Cut)

Neither changes which drafts are right, so the counts are exact and the same on every machine. The best rates are computed from
them and from a pass's cost, `1 + t (T - 1)` plain steps for T tokens, with drafting at `--draft-cost` plain steps: for several
t, and with --seconds for passes that are timed here (on a quiet machine).

Shapes: B rows of a step, K drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import WIDTH
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.data.prompts import load_prompts
from drafttrain.decoding.acceptance import AcceptedPath
from drafttrain.decoding.decoder import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.decoding.tree_size import proposal_seconds, verification_seconds
from drafttrain.drafters.checkpoint import load_drafter
from drafttrain.measure.cases import alternate_categories, encode_cases
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target

TOKEN_COSTS = (0.0, 0.005, 0.02, 0.05, 0.1, 0.3)
NEW = 128
Cost = Callable[[int], float]  # of a pass, by its tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step with whole chains."""

    reach_BK: Tensor  # product of the confidences down to each draft
    accepted_B: Tensor  # drafts that the target accepts

    def kept(self, depth_B: Tensor) -> int:
        """Accepted drafts where only the first depth_B are verified."""
        return int(torch.minimum(self.accepted_B, depth_B).sum())

    def even(self, depth: int) -> Tensor:
        return torch.full_like(self.accepted_B, depth)

    def ragged(self, drafts: int) -> Tensor:
        """Depths that hold so many drafts in all, by the greatest products. A product never grows, so they are chains."""
        rows, K = self.reach_BK.shape
        order_M = self.reach_BK.flatten().argsort(descending=True, stable=True)[:drafts]
        return torch.bincount(order_M // K, minlength=rows)


def steps_of(decoder: Decoder, prompts: Sequence[list[int]], batch: int) -> list[Step]:
    """Decode the prompts, and keep the steps in which every row is busy."""
    steps, accept = [], decoder.policy.accept

    def recorded(tree: DraftTree, *given: Any) -> AcceptedPath:
        found = accept(tree, *given)
        if tree.confidence_BN is not None and len(tree.token_BN) == batch:
            steps.append(Step(tree.confidence_BN[:, 1:].double().cumprod(1), found.count_B - 1))
        return found

    decoder.policy = replace(decoder.policy, accept=recorded)
    decoder.run(prompts, batch)
    decoder.policy = replace(decoder.policy, accept=accept)
    return steps


def counts(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """For each depth of the even cut: the accepted drafts that each cut keeps, and the drafts that ragged needs for as many."""
    rows, K = steps[0].reach_BK.shape
    whole, found = sum(step.kept(step.even(K)) for step in steps), []
    needed = _drafts_for(steps)
    for depth in range(1, K + 1):
        even, ragged = (sum(map(Step.kept, steps, cut)) for cut in _cuts(steps, depth))
        found.append({
            "depth": depth, "drafts": depth * rows * len(steps), "accepted": whole, "even_keeps": even, "ragged_keeps": ragged,
            "ragged_needs": next((drafts for drafts, kept in needed if kept >= even), None),
        })  # fmt: skip
    return found


def _cuts(steps: Sequence[Step], depth: int) -> tuple[list[Tensor], list[Tensor]]:
    return [step.even(depth) for step in steps], [step.ragged(depth * len(step.accepted_B)) for step in steps]


def _drafts_for(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """(drafts, accepted drafts kept) where every step takes the drafts above one product, for ever smaller products."""
    found = []
    for least in torch.linspace(1.0, 0.0, 201).tolist():
        depths = [(step.reach_BK >= least).sum(1) for step in steps]
        found.append((sum(int(d.sum()) for d in depths), sum(map(Step.kept, steps, depths))))
    return found


def rates(steps: Sequence[Step], cost: Cost, draft: float) -> tuple[float, float, float]:
    """Tokens per unit of cost: whole chains, the best even cut, the best ragged cut, each chosen before a step's verification
    from its confidences, as the decoder would."""
    rows, K = steps[0].reach_BK.shape
    whole, even, ragged = ([0.0, 0.0] for _ in range(3))
    for step in steps:
        by_depth_K = torch.cat([torch.zeros(1, dtype=torch.float64), step.reach_BK.sum(0).cumsum(0)])
        by_draft_M = step.reach_BK.flatten().sort(descending=True).values.cumsum(0)
        depth = _best(rows, by_depth_K.tolist(), [d * rows for d in range(K + 1)], cost, draft)
        drafts = _best(rows, [0.0, *by_draft_M.tolist()], range(rows * K + 1), cost, draft)
        for total, depth_B in ((whole, step.even(K)), (even, step.even(depth)), (ragged, step.ragged(drafts))):
            total[0] += rows + step.kept(depth_B)
            total[1] += draft + cost(rows + int(depth_B.sum()))
    return whole[0] / whole[1], even[0] / even[1], ragged[0] / ragged[1]


def _best(rows: int, expected: Sequence[float], drafts: Sequence[int], cost: Cost, draft: float) -> int:
    """The choice with most expected tokens per cost. expected: accepted drafts of each choice."""
    return max(range(len(drafts)), key=lambda i: (rows + expected[i]) / (draft + cost(rows + drafts[i])))


def timed(target: Any, drafter: Any, batch: int) -> tuple[Cost, float]:
    """(seconds of a pass by its tokens, seconds of a proposal), timed here. Between widths the cost is interpolated."""
    found = verification_seconds(target, drafter, range(1, drafter.draft_length + 2), batch=batch)

    def cost(tokens: int) -> float:
        width = tokens / batch
        low = min(int(width), drafter.draft_length)
        return found[low] + (found[low + 1] - found[low]) * (width - low)

    return cost, proposal_seconds(target, drafter, batch=batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--draft-cost", type=float, default=0.3, help="of a proposal, in plain steps")
    parser.add_argument("--seconds", action="store_true", help="also time passes and proposals here")
    parser.add_argument("--json", type=Path)
    given, console, record = parser.parse_args(), Console(width=WIDTH), []
    loaded = load_target(TargetOptions(name="embedded"))
    target, drafter = loaded.target, load_drafter(given.checkpoint, loaded.target)[0].requires_grad_(False)
    cases, _ = encode_cases(load_prompts("embedded", None), loaded.tokenizer, 512)
    prompts = [case.tokens for case in alternate_categories(cases)][: given.prompts]
    for batch in given.batches:
        decoder = Decoder(target, drafter, "greedy", Sampling(), target.stop_ids, NEW, controls=Controls(capture=False))
        steps = steps_of(decoder, prompts, batch)
        if not steps:
            raise SystemExit("this drafter gives no confidence, or there are fewer prompts than rows")
        found = counts(steps)
        console.print(_count_table(batch, len(steps), found))
        table = Table("cost", "whole", "even", "ragged", "ragged / even", box=None, width=WIDTH)
        costs: list[tuple[str, Cost, float]] = [
            (f"t = {t:g}", lambda tokens, t=t: 1 + t * (tokens - 1), given.draft_cost) for t in TOKEN_COSTS
        ]
        if given.seconds:
            costs.append(("timed here", *timed(target, drafter, batch)))
        for name, cost, draft in costs:
            whole, even, ragged = rates(steps, cost, draft)
            table.add_row(name, *(f"{rate:.2f}" for rate in (whole, even, ragged)), f"{ragged / even:.3f}")
            record.append({"batch": batch, "cost": name, "whole": whole, "even": even, "ragged": ragged})
        console.print(table)
        record += [{"batch": batch, "steps": len(steps)} | line for line in found]
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _count_table(batch: int, steps: int, found: Sequence[dict[str, Any]]) -> Table:
    columns = ("depth", "drafts verified", "even keeps", "ragged keeps", "even: never accepted", "ragged: as many with")
    table = Table(*columns, title=f"batch {batch}, {steps} steps", title_justify="left", box=None, width=WIDTH)
    for line in found:
        needs, drafts = line["ragged_needs"], line["drafts"]
        kept = [f"{line[key]} ({line[key] / line['accepted']:.1%})" for key in ("even_keeps", "ragged_keeps")]
        table.add_row(
            str(line["depth"]), str(drafts), *kept,
            f"{drafts - line['even_keeps']} ({1 - line['even_keeps'] / drafts:.0%})",
            "-" if needs is None else f"{needs} ({needs / drafts:.0%})",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
