"""The fast runner of a target with latent attention compared with transformers' forward: ratios taken in one run.

    python -m benchmarks.latent [--architecture NAME] [--prompt 64 1024] [--repeats 5] [--json FILE]

The target is a random model of a few million parameters, under both runners. The drafter is always right and costs nothing.
The two sides of a ratio alternate, medians of repeats. Before timing, all sides must give the same tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.common import WIDTH, Line, Run, interleaved, ratio, report
from benchmarks.recurrent import DRAFTS, NEW, Known
from drafttrain.cli.quiet import quiet
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.decoder import Decoder
from drafttrain.model.drafter import Drafter
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.architectures import model_of

WIDER = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "max_position_embeddings": 4096,
}
LATENT = {"q_lora_rank": 96, "kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
CHANGES = WIDER | LATENT | {"num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 64}
NAMES = ("DeepSeek-V2", "DeepSeek-V3", "Kimi-K2")


class Bench:
    """One model under both runners, and its texts after prompts of one length."""

    def __init__(self, name: str, prompt: int, repeats: int) -> None:
        self.fast, self.slow = FastTarget(model_of(name, **CHANGES)), HFTarget(model_of(name, **CHANGES))
        self.repeats, self.prompt = repeats, prompt
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(3, 2000, (2, prompt), generator=generator).tolist()
        self.texts = self.tokens(self.slow, None, 1)
        self.perfect = Known([p + t for p, t in zip(self.prompts, self.texts, strict=True)], None)

    def decoder(self, target: HFTarget, drafter: Drafter | None) -> Decoder:
        return Decoder(target, drafter, "greedy", Sampling(), frozenset(), NEW)

    def tokens(self, target: HFTarget, drafter: Drafter | None, batch: int) -> list[list[int]]:
        return [r.tokens for r in self.decoder(target, drafter).run(self.prompts, batch).results]

    def same_tokens(self) -> bool:
        sides = [(self.fast, None, 1), (self.fast, self.perfect, 1), (self.fast, self.perfect, 2), (self.slow, self.perfect, 1)]
        return all(self.tokens(*side) == self.texts for side in sides)

    def speed(self, target: HFTarget, drafter: Drafter | None) -> Run:
        """Tokens per second after the first token, one request at a time."""
        decoder = self.decoder(target, drafter)

        def run() -> float:
            results = decoder.run(self.prompts).results
            return sum(len(r.tokens) - 1 for r in results) / sum(r.ended - r.first for r in results)

        return run

    def prefill(self, target: HFTarget) -> Run:
        """Prompt tokens per second."""
        decoder = self.decoder(target, None)

        def run() -> float:
            results = decoder.run(self.prompts).results
            return self.prompt * len(results) / sum(r.first - r.started for r in results)

        return run

    def lines(self) -> Iterator[Line]:
        units = "{:.0f} / {:.0f} tokens/s"
        for name, drafter in (("plain decoding", None), (f"chains of {DRAFTS}, always right", self.perfect)):
            both = interleaved(self.repeats, self.speed(self.fast, drafter), self.speed(self.slow, drafter))
            yield ratio(f"{name} after {self.prompt} tokens, fast / transformers", *both, units)
        both = interleaved(self.repeats, self.prefill(self.fast), self.prefill(self.slow))
        yield ratio(f"prefill of {self.prompt} tokens, fast / transformers", *both, units)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=NAMES, default="DeepSeek-V3")
    parser.add_argument("--prompt", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quiet()
    console, lines = Console(width=WIDTH), list[Line]()
    for prompt in arguments.prompt:
        bench = Bench(arguments.architecture, prompt, arguments.repeats)
        held = [target.cache_bytes().position for target in (bench.fast, bench.slow)]
        console.print(f"{arguments.architecture}: bytes of the cache a position: fast {held[0]}, transformers {held[1]}")
        if not bench.same_tokens():
            console.print("not timed: the runners give different tokens", style="red")
            return 1
        lines += bench.lines()
    return report(console, lines, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
