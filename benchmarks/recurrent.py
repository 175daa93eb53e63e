"""Chains for targets with recurrent layers or experts: ratios taken in one run, interleaved, median of repeats.

    python -m benchmarks.recurrent [--architecture NAME] [--repeats 5] [--json FILE]

The target is a random model of a few million parameters. One drafter is always right and costs nothing; the other one is wrong
at each third position, so that states are taken back in most steps. Before timing, all sides must give the same tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.common import WIDTH, Line, Run, interleaved, ratio, report
from drafttrain.cli.quiet import quiet
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.decoder import Decoder
from drafttrain.measure import DecodeOptions
from drafttrain.measure.transformers_baseline import generate
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter, DraftState
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import Taps
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.architectures import ARCHITECTURES, model_of

NEW, DRAFTS, PROMPT = 40, 4, 24
WIDER = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 8, "max_position_embeddings": 1024}
DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32}
LAYERS = (["linear_attention"] * 3 + ["full_attention"]) * 2
CHANGES = {
    "Qwen3-Next": WIDER | DELTA | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 256},
    "Granite-4 (hybrid)": WIDER | SSM | {"layer_types": LAYERS, "shared_intermediate_size": 256},
    "LFM2": WIDER | {"layer_types": (["conv"] * 3 + ["full_attention"]) * 2},
    "Mixtral": WIDER | {"intermediate_size": 256},
}
FAST = ("Mixtral",)  # architectures of the fast runner


class Known(Drafter):
    """Proposes the known continuation of its prompt, with a wrong token at each position that `every` divides."""

    captured = False

    def __init__(self, texts: Sequence[Sequence[int]], every: int | None) -> None:
        super().__init__(Proposal(DRAFTS))
        self.texts, self.every, self.taps = [list(text) for text in texts], every, Taps()

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        raise AssertionError("it is not trained")

    def open(self, slots: int, max_len: int) -> KnownState:
        return KnownState(self, slots)


class KnownState(DraftState):
    def __init__(self, drafter: Known, slots: int) -> None:
        self.drafter = drafter
        self.begun: list[list[int]] = [[] for _ in range(slots)]
        self.length = [0] * slots

    def reset(self, slot_R: Tensor) -> None:
        for slot in slot_R.tolist():
            self.begun[slot], self.length[slot] = [], 0

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        for row, (slot, count) in enumerate(zip(slot_B.tolist(), commit.count_B.tolist(), strict=True)):
            if len(self.begun[slot]) < PROMPT:
                self.begun[slot] += commit.token_BA[row, :count].tolist()
            self.length[slot] += count

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        rows = []
        for slot in slot_B.tolist():
            text = next(t for t in self.drafter.texts if t[:PROMPT] == self.begun[slot][:PROMPT])
            at = self.length[slot]
            drafts = [text[i] if i < len(text) else 0 for i in range(at, at + 1 + DRAFTS)]
            if self.drafter.every:
                drafts[1:] = [t ^ 1 if (at + i) % self.drafter.every == 0 else t for i, t in enumerate(drafts[1:], 1)]
            rows.append(drafts)
        tree = DraftTree.chain(torch.tensor(rows, device=slot_B.device))
        return tree if depth is None else tree.cut(depth)


class Bench:
    def __init__(self, name: str, repeats: int) -> None:
        model = model_of(name, **CHANGES[name])
        self.target, self.repeats = FastTarget(model) if name in FAST else HFTarget(model), repeats
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(3, 2000, (4, PROMPT), generator=generator).tolist()
        texts = [r.tokens for r in self.decoder(None).run(self.prompts, 1).results]
        known = [p + t for p, t in zip(self.prompts, texts, strict=True)]
        self.texts, self.perfect, self.partial = texts, Known(known, None), Known(known, 3)

    def decoder(self, drafter: Drafter | None) -> Decoder:
        return Decoder(self.target, drafter, "greedy", Sampling(), frozenset(), NEW)

    def same_tokens(self) -> str | None:
        given = DecodeOptions(max_new_tokens=NEW)
        theirs = [r.tokens for p in self.prompts for r in generate(self.target.model, [p], frozenset(), given).results]
        if theirs != self.texts:
            return "plain decoding gives other tokens than transformers"
        for name, drafter in (("plain decoding", None), ("the perfect", self.perfect), ("the partly wrong", self.partial)):
            for batch in (1, 4):
                if [r.tokens for r in self.decoder(drafter).run(self.prompts, batch).results] != self.texts:
                    return f"{name} at batch size {batch} gives other tokens"
        return None

    def ours(self, drafter: Drafter | None, batch: int) -> Run:
        decoder = self.decoder(drafter)

        def run() -> float:
            results = decoder.run(self.prompts, batch).results
            spent = [r.ended - r.first for r in results]
            return sum(len(r.tokens) - 1 for r in results) / (sum(spent) if batch == 1 else max(spent))

        return run

    def transformers(self) -> float:
        given = DecodeOptions(max_new_tokens=NEW)
        results = [r for p in self.prompts for r in generate(self.target.model, [p], frozenset(), given).results]
        return sum(len(r.tokens) - 1 for r in results) / sum(r.ended - r.first for r in results)

    def commit_share(self, drafter: Drafter) -> Run:
        """The part of decoding time that commits take: states are made again there."""

        def run() -> float:
            costs = self.decoder(drafter).run(self.prompts).costs
            return costs.commit / (costs.draft + costs.verify + costs.commit + costs.host)

        return run

    def lines(self) -> Iterator[Line]:
        units = "{:.0f} / {:.0f} tokens/s"
        both = interleaved(self.repeats, self.ours(None, 1), self.transformers)
        yield ratio("plain decoding / transformers' generate, batch 1", *both, units)
        for name, drafter in (("always right", self.perfect), ("wrong at each third position", self.partial)):
            for batch in (1, 4):
                both = interleaved(self.repeats, self.ours(drafter, batch), self.ours(None, batch))
                yield ratio(f"chains of {DRAFTS}, {name} / plain decoding, batch {batch}", *both, units)
            share = interleaved(self.repeats, self.commit_share(drafter), lambda: 1.0)
            yield ratio(f"time of commits, {name}, batch 1", *share, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=[name for name in ARCHITECTURES if name in CHANGES], default="Qwen3-Next")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quiet()
    console, bench = Console(width=WIDTH), Bench(arguments.architecture, arguments.repeats)
    held = bench.target.cache_bytes()
    console.print(
        f"{arguments.architecture}: {held.states} bytes of states a request, {held.position} of keys and values a position"
    )
    if (difference := bench.same_tokens()) is not None:
        console.print(f"not timed: {difference}", style="red")
        return 1
    lines = list(bench.lines())
    return report(console, lines, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
