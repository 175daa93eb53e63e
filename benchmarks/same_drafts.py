"""Expected tau of trained drafters with the same proposals: a chain, and the best static tree.

    python -m benchmarks.same_drafts --rows outputs/curves/rows.jsonl [--drafts 5] [--nodes 18]
                                     [--keep FILE] [--plot FILE]

Recipes have their own proposals: EAGLE-3's is a tree, block families' a chain. Here each checkpoint of `benchmarks.quality` for
the embedded target is judged by its teacher-forced agreement on the same held-out conversations, greedy: with a chain of
--drafts drafts at most, and with the tree of --nodes nodes that accepts most on other held-out conversations (four folds).
--keep: a JSON file that the figures are added to; those already in it with the same --drafts and --nodes are in the table and
the picture too.

Shapes: M positions of a conversation, K drafts, C conversations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.quality import draw
from drafttrain.core.intervals import accepted_length, tau_interval
from drafttrain.core.tree import Path as Nodes
from drafttrain.core.tree import arrivals, step_sums, tuned_paths
from drafttrain.data import DataOptions
from drafttrain.data.dataset import collate, load_dataset
from drafttrain.drafters.checkpoint import load_drafter
from drafttrain.features.online import Online
from drafttrain.objective.losses import teacher_forced
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target

RUN = ("recipe", "steps", "vary", "seed", "drafts", "nodes")
FIGURES = (*RUN, "chain", "chain_95", "tree", "tree_95")
ROWS, FOLDS = 4, 4  # conversations at once; folds of the held-out ones


@torch.no_grad()
def ranks(checkpoint: Path, loaded: Any, held_out: Sequence[Any], drafts: int) -> list[Tensor]:
    """[M, K] of each conversation: the rank that the drafter gives to the true token."""
    drafter, _ = load_drafter(checkpoint, loaded.target)
    drafter.eval()
    source, found = Online(loaded.target, drafter.taps), list[Tensor]()
    for start in range(0, len(held_out), ROWS):
        batch = source.fill(collate(held_out[start : start + ROWS], loaded.tokenizer.pad_token_id or 0))
        hits = teacher_forced(drafter, loaded.target, batch)
        found += [rank_MK[:, :drafts] for rank_MK in hits.rank_MK.split(hits.length_D)]
    return found


def tau(rank_sequences: Sequence[Tensor], paths: Sequence[Sequence[Nodes]]) -> tuple[float, tuple[float, float]]:
    """Expected tau and its 95 % interval. paths: of each conversation's tree."""
    sum_C2 = torch.cat([step_sums([arrivals(rank_MK, own)]) for rank_MK, own in zip(rank_sequences, paths, strict=True)])
    interval = tau_interval(sum_C2)
    assert interval is not None
    return float(accepted_length(sum_C2.sum(0))), (interval[0], interval[1])


def trees(rank_sequences: Sequence[Tensor], nodes: int) -> list[list[Nodes]]:
    """For each conversation the tree that accepts most on those of other folds."""
    of_fold = [tuned_paths([r for i, r in enumerate(rank_sequences) if i % FOLDS != fold], nodes) for fold in range(FOLDS)]
    return [of_fold[i % FOLDS] for i in range(len(rank_sequences))]


def judged(rows: Sequence[dict[str, Any]], drafts: int, nodes: int) -> Iterator[dict[str, Any]]:
    """Each row with expected tau of the chain and of the tree."""
    loaded = load_target(TargetOptions())
    held_out = load_dataset(DataOptions(), loaded.tokenizer, progress=False).held_out
    for row in rows:
        found = ranks(Path(row["checkpoint"]), loaded, held_out, drafts)
        chain = [(0,) * depth for depth in range(1, found[0].shape[1] + 1)]
        of_chain, of_tree = tau(found, [chain] * len(found)), tau(found, trees(found, nodes))
        budget = {"drafts": drafts, "nodes": nodes}
        yield row | budget | {"chain": of_chain[0], "chain_95": of_chain[1], "tree": of_tree[0], "tree_95": of_tree[1]}


def merged(found: Sequence[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """These figures and those in the file, which then holds both. Newer ones replace those of the same run."""
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    new = [{name: rounded(row[name]) for name in FIGURES} for row in found]
    by_run = {tuple(row[name] for name in RUN): row for row in (*before, *new)}
    rows = [by_run[run] for run in sorted(by_run)]
    file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    return rows


def rounded(value: Any) -> Any:
    """A figure, or several, to four digits after the point; anything else as it is."""
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=18)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(arguments)
    rows = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines()]
    found = list(judged([row for row in rows if "expected_tau" in row], given.drafts, given.nodes))
    if given.keep is not None:
        budget = (given.drafts, given.nodes)
        found = [row for row in merged(found, given.keep) if (row["drafts"], row["nodes"]) == budget]
    table = Table("recipe", "steps", f"chain of {given.drafts}", f"tree of {given.nodes}")
    for row in sorted(found, key=lambda row: (row["recipe"], row["steps"])):
        taus = [f"{row[kind]:.2f} ({row[f'{kind}_95'][0]:.2f} to {row[f'{kind}_95'][1]:.2f})" for kind in ("chain", "tree")]
        table.add_row(row["recipe"], f"{row['steps']:,}", *taus)
    Console().print(table)
    if given.plot is not None:
        lines: dict[str, dict[int, list[float]]] = {}
        for row in found:
            for kind in ("chain", "tree"):
                lines.setdefault(f"{row['recipe']}, {kind}", {}).setdefault(row["steps"], []).append(row[kind])
        draw(lines, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
