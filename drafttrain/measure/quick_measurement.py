"""A small measurement during training: a few prompts, decoded once with the drafter and once without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from drafttrain.data.prompts import Prompt
from drafttrain.measure import DecodeOptions, MeasureOptions
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import encode_cases
from drafttrain.measure.entry import race_keys
from drafttrain.measure.plan import Budget
from drafttrain.model.drafter import Drafter
from drafttrain.targets.load import LoadedTarget

NOW, HOURS = "now", 1e9


def quick_measurement(
    loaded: LoadedTarget, decode: DecodeOptions, options: MeasureOptions, prompts: Sequence[Prompt]
) -> Callable[[Drafter], dict[str, float]]:
    """A function that measures a drafter's `measured_tau` and `measured_speedup`.

    It uses the first batch size and `every_prompts` of the prompts. Raises UserError if all prompts are too long.
    """
    room = loaded.target.shape.max_positions - decode.max_new_tokens
    cases, _ = encode_cases(prompts, loaded.tokenizer, room, loaded.images)
    cases, size = cases[: options.every_prompts], options.batch_sizes[0]
    once = replace(options, repeats=1, transformers=False)

    def quick_measure(drafter: Drafter) -> dict[str, float]:
        bench = Bench(loaded, decode, once, Budget(HOURS), lambda *_: None)
        keys = race_keys(bench.race({NOW: drafter.requires_grad_(False)}, cases, size, HOURS, "glance"), NOW)
        return {"measured_tau": keys["tau"] or 1.0, "measured_speedup": keys["speedup"] or 1.0}

    return quick_measure
