"""A small measurement while training goes on: some prompts, once, beside plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from drafttrain.data.prompts import load_prompts
from drafttrain.measure import DecodeOptions, MeasureOptions
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import encode_cases
from drafttrain.measure.entry import race_keys
from drafttrain.measure.plan import Budget
from drafttrain.model.drafter import Drafter
from drafttrain.targets.load import LoadedTarget

NOW, HOURS = "now", 1e9


def quick_measurement(
    loaded: LoadedTarget, decode: DecodeOptions, options: MeasureOptions, prompts: str | None = None
) -> Callable[[Drafter], dict[str, float]]:
    """Of a drafter: `measured_tau` and `measured_speedup` at the first batch size, over `every_prompts` prompts.

    prompts: a file instead of `options.prompts`. Raises UserError for prompts that cannot be read or are all too long.
    """
    room = loaded.target.shape.max_positions - decode.max_new_tokens
    cases, _ = encode_cases(load_prompts(prompts or options.prompts, options.limit), loaded.tokenizer, room)
    cases, size = cases[: options.every_prompts], options.batch_sizes[0]
    once = replace(options, repeats=1, transformers=False)

    def quick_measure(drafter: Drafter) -> dict[str, float]:
        bench = Bench(loaded, decode, once, Budget(HOURS), lambda *_: None)
        keys = race_keys(bench.race({NOW: drafter.requires_grad_(False)}, cases, size, HOURS, "glance"), NOW)
        return {"measured_tau": keys["tau"] or 1.0, "measured_speedup": keys["speedup"] or 1.0}

    return quick_measure
