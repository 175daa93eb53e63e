"""The decoder compared with named alternatives, as ratios taken in one run: interleaved, median of repeats.

    python -m benchmarks.decode [--checkpoint DIR] [--target DIR] [--repeats 5] [--only NAME ...] [--json FILE]

It uses the embedded target. Before timing, the compared sides must give the same tokens; otherwise only that is printed, and
the exit code is 1. Each line shows the ratio, its goal, and its two figures.

--checkpoint: a drafter of the embedded target (the quickstart's), for the figures that need a trained one.
--target: only plain decoding of this model on a CPU, in float32 and bfloat16, and what reading their weights allows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from transformers import GenerationConfig

from benchmarks.common import WIDTH, Line, Run, interleaved, ratio, report
from drafttrain.cli.quiet import quiet
from drafttrain.core.sampling import Sampling
from drafttrain.data.prompts import load_prompts
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.decoding.tree_size import best_nodes
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import load_drafter
from drafttrain.measure import DecodeOptions
from drafttrain.measure.bench import generate, generation_config_of
from drafttrain.measure.cases import alternate_categories, encode_cases
from drafttrain.measure.expected import forced_hits
from drafttrain.model.drafter import Drafter
from drafttrain.model.joint import PACKED_BYTES
from drafttrain.model.target import Taps
from drafttrain.ops import library
from drafttrain.ops.linear import packed_dtypes
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target

NEW, CONTEXT = 128, 128
FORMAT_TOKENS = 48


class Bench:
    """The embedded target, prompts, and the compared pairs."""

    def __init__(self, checkpoint: Path | None, repeats: int) -> None:
        self.loaded = load_target(TargetOptions(name="embedded"))
        self.target, self.repeats = self.loaded.target, repeats
        cases, _ = encode_cases(load_prompts("embedded", None), self.loaded.tokenizer, 512)
        self.prompts = [case.tokens for case in alternate_categories(cases)]
        self.trained: Drafter | None = None
        if checkpoint is not None:
            self.trained = load_drafter(checkpoint, self.target)[0].requires_grad_(False)
        family = families()["draft_model"]
        self.pruned = family.build(family.options(blocks=3, draft_length=4), self.target).eval().requires_grad_(False)
        self.wrong = family.build(family.options(blocks=3, draft_length=4), self.target).eval().requires_grad_(False)
        for parameter in self.wrong.parameters():  # always wrong: its tokens are the target's, shifted
            if parameter.shape[0] == self.target.shape.vocab_size:
                parameter.data = parameter.data.roll(1, 0)

    def decoder(self, drafter: Drafter | None = None, new: int = NEW, **controls: Any) -> Decoder:
        return Decoder(self.target, drafter, "greedy", Sampling(), frozenset(), new, controls=Controls(**controls))

    def line(
        self, name: str, top: Run, bottom: Run, units: str, at_least: float | None = None, at_most: float | None = None
    ) -> Line:
        return ratio(name, *interleaved(self.repeats, top, bottom), units, at_least, at_most)

    def assisted(self, prompt: list[int]) -> Any:
        """transformers' assisted generation with the same pair and the same draft length."""
        model, assistant = self.target.model, self.pruned.lm.model
        assistant.generation_config.num_assistant_tokens = 4
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
        with torch.inference_mode(), generation_config_of(model, config):
            text = model.generate(torch.tensor([prompt]), generation_config=config, assistant_model=assistant)
        return text[0, len(prompt) :].tolist()

    def same_tokens(self) -> str | None:
        """The first difference, or none: drafted, queued and plain output must equal transformers'."""
        some = self.prompts[:6]
        wanted = [
            r.tokens
            for p in some
            for r in generate(self.target.model, [p], frozenset(), DecodeOptions(max_new_tokens=NEW)).results
        ]
        contenders = {"plain": None, "draft model": self.pruned} | ({"checkpoint": self.trained} if self.trained else {})
        for name, drafter in contenders.items():
            for batch in (1, 4):
                if [r.tokens for r in self.decoder(drafter).run(some, batch).results] != wanted:
                    return f"{name} at batch size {batch} gives other tokens than transformers"
        if self.assisted(some[0]) != wanted[0]:
            return "transformers' assisted generation gives other tokens than transformers"
        return None

    # -- the timed runs: tokens per second after the first token, over a few prompts one after the other

    def ours(self, drafter: Drafter | None, **controls: Any) -> Run:
        decoder, some = self.decoder(drafter, **controls), self.prompts[:4]

        def run() -> float:
            results = decoder.run(some).results
            return sum(len(r.tokens) - 1 for r in results) / sum(r.ended - r.first for r in results)

        return run

    def transformers(self) -> float:
        results = [
            r
            for p in self.prompts[:4]
            for r in generate(self.target.model, [p], frozenset(), DecodeOptions(max_new_tokens=NEW)).results
        ]
        return sum(len(r.tokens) - 1 for r in results) / sum(r.ended - r.first for r in results)

    def transformers_assisted(self) -> float:
        began = perf_counter()
        tokens = sum(len(self.assisted(p)) for p in self.prompts[:4])
        return tokens / (perf_counter() - began)

    def ours_assisted(self) -> float:
        began = perf_counter()
        tokens = sum(len(r.tokens) for r in self.decoder(self.pruned).run(self.prompts[:4]).results)
        return tokens / (perf_counter() - began)

    def forward(self, rows: int, nodes: int, context: int = CONTEXT) -> Run:
        """Milliseconds of one verification after this many committed positions."""
        kv = self.target.new_cache(rows, context + nodes)
        with torch.inference_mode():
            position = torch.arange(context).expand(rows, context)
            token = torch.randint(6, 2000, (rows, context))
            self.target(token, kv, None, position, Taps(), torch.empty(rows, 0, dtype=torch.long))
            kv.keep(position, torch.full((rows,), context))
        ancestor = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, nodes, nodes)
        at, new = (context + torch.arange(nodes)).expand(rows, nodes), torch.randint(6, 2000, (rows, nodes))

        def run() -> float:
            with torch.inference_mode():
                return milliseconds(lambda: self.target(new, kv, ancestor, at, Taps()))

        return run

    def linears(self, rows: int) -> Run:
        """Milliseconds of the target's linear layers, in the order and with the calls of its forward."""
        hidden = torch.randn(1, rows, self.target.shape.hidden_size)
        inner = torch.randn(1, rows, self.target.shape.intermediate_size)
        heads = torch.randn(1, rows, self.target.shape.heads * self.target.shape.head_dim)

        def forward() -> None:
            for block in self.target._chain:
                block.qkv(hidden), block.out(heads), block.gate_up(hidden), block.down(inner)
            self.target.head(hidden)

        def run() -> float:
            with torch.inference_mode():
                return milliseconds(forward)

        return run

    def host_share(self, drafter: Drafter | None) -> float:
        """The part of a step's time outside target and drafter."""
        costs = self.decoder(drafter).run(self.prompts[:4]).costs
        return (costs.commit + costs.host) / (costs.draft + costs.verify + costs.commit + costs.host)

    def queue(self, drafter: Drafter | None, requests: int, slots: int, new: int, **controls: Any) -> float:
        """Tokens per second of this many queued requests, prefill included."""
        decoder = self.decoder(drafter, new, **controls)
        asked = [Request(self.prompts[i % len(self.prompts)][-64:], i, new) for i in range(requests)]
        session = Session(decoder, slots, max(map(decoder.positions, asked)))
        results = [r for request in asked for r in session.submit(request)]
        began = perf_counter()
        for _ in session:
            pass
        return sum(len(r.tokens) for r in results) / (perf_counter() - began)

    def fit_tree(self) -> int:
        """Give the trained drafter the best tree for this machine, from measured times and from ranks on prompts that are not
        timed.
        """
        assert self.trained is not None
        asked = self.prompts[4:]
        replies = [r.tokens for r in self.decoder().run(asked, 8).results]
        hits = forced_hits(self.target, self.trained, asked, replies, self.target.device)
        texts = [text for h in hits for text in h.rank_MK.split(h.length_D)]
        self.trained.proposal.tune(texts, best_nodes(self.target, self.trained, texts))
        return len(self.trained.proposal.paths)

    def lines(self) -> Iterator[tuple[str, Callable[[], Line]]]:
        yield "plain", lambda: self.line(
            "plain decoding / transformers' generate, batch 1",
            self.ours(None), self.transformers, "{:.0f} / {:.0f} tokens/s", at_least=2.5,
        )  # fmt: skip
        yield "assisted", lambda: self.line(
            "draft model / transformers' assisted generation, same pair",
            self.ours_assisted, self.transformers_assisted, "{:.0f} / {:.0f} tokens/s", at_least=3.0,
        )  # fmt: skip
        for name, drafter in (("plain", None), ("draft model", self.pruned), ("checkpoint", self.trained)):
            if name == "plain" or drafter is not None:
                yield (
                    "host",
                    lambda name=name, drafter=drafter: self.line(
                        f"time outside the models, {name}", lambda: self.host_share(drafter), lambda: 1.0, "", at_most=0.1
                    ),
                )
        yield "verify", lambda: self.line(
            f"verification of 16 nodes / its linear layers, {CONTEXT} positions before",
            self.forward(1, 16), self.linears(16), "{:.2f} / {:.2f} ms", at_most=1.25,
        )  # fmt: skip
        if self.trained is not None:
            own = len(self.trained.proposal.paths)
            yield "speedup", lambda: self.line(
                f"checkpoint / plain decoding, batch 1, its {own} nodes",
                self.ours(self.trained), self.ours(None), "{:.0f} / {:.0f} tokens/s", at_least=1.0,
            )  # fmt: skip
            yield "speedup", lambda: self.line(
                f"checkpoint / plain decoding, batch 1, {self.fit_tree()} nodes chosen for this machine",
                self.ours(self.trained), self.ours(None), "{:.0f} / {:.0f} tokens/s", at_least=1.15,
            )  # fmt: skip
        yield "fallback", lambda: self.line(
            "a drafter that is never right, with fallback / plain decoding",
            self.ours(self.wrong, fallback=True), self.ours(None), "{:.0f} / {:.0f} tokens/s", at_least=0.97,
        )  # fmt: skip
        raw = self.forward(64, 1, 64 + 96 // 2)  # the mean length of the queued requests
        queued = {"plain": (None, {}), "draft model with fallback": (self.pruned, {"fallback": True})}
        if self.trained is not None:
            queued["checkpoint with fallback"] = (self.trained, {"fallback": True})
        for name, (drafter, controls) in queued.items():
            yield "batching", lambda name=name, drafter=drafter, controls=controls: self.line(
                f"256 requests through 64 slots / bare step of 64, {name}",
                lambda: self.queue(drafter, 256, 64, 96, **controls), lambda: 64e3 / raw(),
                "{:.0f} / {:.0f} tokens/s", at_least=0.6,
            )  # fmt: skip
        for requests in (10, 100, 1000):
            yield "flat", lambda requests=requests: self.line(
                f"tokens/s of {requests} queued requests / of one at a time, one slot",
                lambda: self.queue(None, requests, 1, 12), lambda: median(self.queue(None, 1, 1, 12) for _ in range(20)),
                "{:.0f} / {:.0f} tokens/s", at_least=0.9,
            )  # fmt: skip


def format_lines(target: str, repeats: int) -> Iterator[Line]:
    """Plain decoding of one prompt by the format of the weights."""
    decoders, weight_bytes = {}, {}
    for dtype in ("float32", "bfloat16"):
        loaded = load_target(TargetOptions(name="hf", path=target, dtype=dtype, device="cpu"))
        decoders[dtype] = Decoder(loaded.target, None, "greedy", Sampling(), frozenset(), FORMAT_TOKENS)
        linears = [m for m in loaded.target.model.modules() if isinstance(m, torch.nn.Linear)]
        weight_bytes[dtype] = sum(m.weight.numel() * m.weight.element_size() for m in linears)
    memory = torch.ones(2**27)

    def tokens_per_s(dtype: str) -> float:
        start = perf_counter()
        decoders[dtype].run([list(range(5, 5 + 32))])
        return FORMAT_TOKENS / (perf_counter() - start)

    def allowed(dtype: str) -> float:
        return memory.nbytes / (milliseconds(memory.sum, 5) / 1e3) / weight_bytes[dtype]

    runs = [partial(tokens_per_s, dtype) for dtype in decoders] + [partial(allowed, dtype) for dtype in decoders]
    wide, narrow, wide_bound, narrow_bound = interleaved(repeats, *runs)
    units = "{:.1f} / {:.1f} tokens/s"
    goal_of = {dtype: 0.7 if weight_bytes[dtype] <= PACKED_BYTES and getattr(torch, dtype) in packed_dtypes() else None
               for dtype in decoders}  # fmt: skip
    yield ratio("plain decoding, bfloat16 / float32", narrow, wide, units)
    yield ratio("float32 / what reading its weights allows", wide, wide_bound, units, at_least=goal_of["float32"])
    yield ratio("bfloat16 / what reading its weights allows", narrow, narrow_bound, units, at_least=goal_of["bfloat16"])


def milliseconds(work: Callable[[], object], times: int = 20) -> float:
    spent = []
    for _ in range(times):
        began = perf_counter()
        work()
        spent.append(perf_counter() - began)
    return 1e3 * median(spent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quiet()
    torch.manual_seed(0)
    console = Console(width=WIDTH)
    if arguments.target is not None:
        return report(console, list(format_lines(arguments.target, arguments.repeats)), arguments.json)
    bench = Bench(arguments.checkpoint, arguments.repeats)
    console.print(f"operators: {library.state().text}", soft_wrap=True)
    if (difference := bench.same_tokens()) is not None:
        console.print(f"not timed: {difference}", style="red")
        return 1
    lines = []
    for name, measure in bench.lines():
        if arguments.only and name not in arguments.only:
            continue
        lines.append(measure())
        console.print(f"{lines[-1].name}: {lines[-1].value:.2f}", style="dim", soft_wrap=True)
    return report(console, lines, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
