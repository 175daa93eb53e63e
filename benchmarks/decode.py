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
from collections.abc import Callable, Iterator, Sequence
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
from drafttrain.decoding.scheduler import Decoded, Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import load_drafter
from drafttrain.measure import DecodeOptions
from drafttrain.measure.bench import generate, generation_config_of
from drafttrain.measure.cases import alternate_categories, encode_cases
from drafttrain.measure.speed import tpot
from drafttrain.model.drafter import Drafter
from drafttrain.model.joint import PACKED_BYTES
from drafttrain.ops import library
from drafttrain.ops.linear import packed_dtypes
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target

NEW = 128
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

    def decoder(self, drafter: Drafter | None, **controls: Any) -> Decoder:
        return Decoder(self.target, drafter, "greedy", Sampling(), frozenset(), NEW, controls=Controls(**controls))

    def line(self, name: str, top: Run, bottom: Run, at_least: float) -> Line:
        return ratio(name, *interleaved(self.repeats, top, bottom), "{:.0f} / {:.0f} tokens/s", at_least)

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

    def generated(self, prompts: Sequence[list[int]]) -> list[Decoded]:
        """By transformers' `generate`, one prompt after the other."""
        options = DecodeOptions(max_new_tokens=NEW)
        return [generate(self.target.model, [prompt], frozenset(), options) for prompt in prompts]

    def same_tokens(self) -> str | None:
        """The first difference, or none: drafted, queued and plain output must equal transformers'."""
        some = self.prompts[:6]
        wanted = [r.tokens for wave in self.generated(some) for r in wave.results]
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
        decoder = self.decoder(drafter, **controls)
        return lambda: rate([decoder.run(self.prompts[:4])])

    def transformers(self) -> float:
        return rate(self.generated(self.prompts[:4]))

    def transformers_assisted(self) -> float:
        began = perf_counter()
        tokens = sum(len(self.assisted(p)) for p in self.prompts[:4])
        return tokens / (perf_counter() - began)

    def ours_assisted(self) -> float:
        began = perf_counter()
        tokens = sum(len(r.tokens) for r in self.decoder(self.pruned).run(self.prompts[:4]).results)
        return tokens / (perf_counter() - began)

    def lines(self) -> Iterator[tuple[str, Callable[[], Line]]]:
        """(name for --only, the measurement) of every figure."""
        plain = self.ours(None)
        yield "plain", partial(self.line, "plain decoding / transformers' generate, batch 1", plain, self.transformers, 2.5)
        name = "draft model / transformers' assisted generation, same pair"
        yield "assisted", partial(self.line, name, self.ours_assisted, self.transformers_assisted, 3.0)
        if self.trained is not None:
            own = len(self.trained.proposal.paths)
            name = f"checkpoint / plain decoding, batch 1, its {own} nodes"
            yield "speedup", partial(self.line, name, self.ours(self.trained), plain, 1.0)
        name = "a drafter that is never right, with fallback / plain decoding"
        yield "fallback", partial(self.line, name, self.ours(self.wrong, fallback=True), plain, 0.97)


def rate(waves: Sequence[Decoded]) -> float:
    """Tokens per second after each first token, whose pass is not bound by memory."""
    return 1.0 / (tpot(waves) or float("inf"))


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
        return rate([decoders[dtype].run([list(range(5, 5 + 32))])])

    def allowed(dtype: str) -> float:
        spent = []
        for _ in range(5):
            began = perf_counter()
            memory.sum()
            spent.append(perf_counter() - began)
        return memory.nbytes / median(spent) / weight_bytes[dtype]

    runs = [partial(tokens_per_s, dtype) for dtype in decoders] + [partial(allowed, dtype) for dtype in decoders]
    wide, narrow, wide_bound, narrow_bound = interleaved(repeats, *runs)
    units = "{:.1f} / {:.1f} tokens/s"
    packed = [d for d in decoders if weight_bytes[d] <= PACKED_BYTES and getattr(torch, d) in packed_dtypes()]
    goal_of = {dtype: 0.7 if dtype in packed else None for dtype in decoders}
    yield ratio("plain decoding, bfloat16 / float32", narrow, wide, units)
    yield ratio("float32 / what reading its weights allows", wide, wide_bound, units, at_least=goal_of["float32"])
    yield ratio("bfloat16 / what reading its weights allows", narrow, narrow_bound, units, at_least=goal_of["bfloat16"])


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
