"""transformers' `generate`, greedy: an independent check of the tokens, and a second baseline of speed.

Shapes: B prompts, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from drafttrain.decoding import guards
from drafttrain.decoding.decoder import Decoded
from drafttrain.decoding.request import Result, StopText
from drafttrain.decoding.scheduler import Costs
from drafttrain.measure import DecodeOptions


class _Stopwatch(StoppingCriteria):
    """Records the time of the first token. It never stops generation."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        if self.first is None:
            self.first = perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    decode: DecodeOptions,
    stop_text: StopText | None = None,
    guards: Sequence[guards.Guard | None] | None = None,
    inputs: Callable[[Tensor], dict[str, Tensor]] | None = None,
) -> Decoded:
    """Greedy `generate`, with its cache, on all prompts as one left-padded batch. Each output is cut where it ends.

    guards: one per prompt; only guards that stop an output. Times are those of the whole batch, so timings are meaningful for a
    batch of one only. Costs stay empty. inputs: the model's inputs for the prompts; None: their tokens.
    """
    longest = max(len(p) for p in prompts)
    pad = min(stop_ids, default=0)
    token_BT = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    settings = _greedy(stop_ids or {model.config.get_text_config().vocab_size}, pad, decode)
    stopwatch, started = _Stopwatch(), perf_counter()
    with torch.inference_mode(), generation_config_of(model, settings):
        text_BT = model.generate(
            **({"input_ids": token_BT} if inputs is None else inputs(token_BT)),
            attention_mask=mask_BT,
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([stopwatch]),
        )
    rows = zip(prompts, text_BT[:, longest:].tolist(), guards or [None] * len(prompts), strict=True)
    outputs = [_cut(prompt, row, stop_ids, stop_text, guard) for prompt, row, guard in rows]
    ended = perf_counter()
    first = ended if stopwatch.first is None else stopwatch.first
    results = [
        Result(i, len(p), tokens=o, verifications=len(o) - 1, emitted=len(o) - 1, started=started, first=first, ended=ended)
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return Decoded(results, Costs())


@contextmanager
def generation_config_of(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Meanwhile the model has these settings alone. generate() takes what a call leaves open from those of the model's
    generation_config.json, which may suppress tokens, ask for another cache or return something else than tokens.
    """
    original_config, model.generation_config = model.generation_config, settings
    try:
        yield
    finally:
        model.generation_config = original_config


def _greedy(stop_ids: Collection[int], pad: int, decode: DecodeOptions) -> GenerationConfig:
    """Greedy decoding. stop_ids: at least one; a number past the vocabulary stops no text."""
    return GenerationConfig(
        max_new_tokens=decode.max_new_tokens,
        min_new_tokens=decode.min_new_tokens or None,
        do_sample=False,
        repetition_penalty=decode.repetition_penalty,
        use_cache=True,
        eos_token_id=sorted(stop_ids),
        pad_token_id=pad,
    )


def _cut(
    prompt: Sequence[int], tokens: list[int], stop_ids: frozenset[int], stop_text: StopText | None, guard: guards.Guard | None
) -> list[int]:
    end = next((i + 1 for i, t in enumerate(tokens) if t in stop_ids), len(tokens))
    text_end = stop_text.end(prompt, tokens, len(tokens)) if stop_text else None
    output = tokens[: min(end, text_end or end)]
    act = guards.Watch(guard).act(output, len(output)) if guard else None
    return output[: act.kept] if act else output
