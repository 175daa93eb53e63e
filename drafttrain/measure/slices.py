"""Slices by temperature and by context length, with a race for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drafttrain.data.prompts import long_prompts, read_documents
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.measure import DecodeOptions
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import Case
from drafttrain.measure.entry import Keys, race_keys
from drafttrain.model.drafter import Drafter

LONG = 4  # prompts of each context length; their prefill takes most of the time


@dataclass(frozen=True, slots=True)
class Condition:
    """A slice and the race for it, at the first batch size."""

    by: str  # temperature or context
    value: Any
    bench: Bench
    cases: Sequence[Case]


def conditions(bench: Bench, cases: Sequence[Case]) -> list[Condition]:
    """The conditions that the options ask for and the target supports. Notes list those left out.

    Raises UserError for documents that cannot be read.
    """
    race_conditions = [
        Condition("temperature", temperature, replace(bench, decode=at_temperature(bench.decode, temperature)), cases)
        for temperature in bench.options.temperatures
        if temperature != bench.decode.temperature
    ]
    if bench.options.contexts:
        race_conditions += _contexts(bench)
    return race_conditions


def other_slices(wanted: Sequence[Condition], drafters: Mapping[str, Drafter]) -> dict[str, list[Keys]]:
    """The slices of each drafter. Every condition gets an equal share of the remaining budget."""
    slices_by_name: dict[str, list[Keys]] = {name: [] for name in drafters}
    for races_done, condition in enumerate(wanted):
        bench = condition.bench
        size = bench.options.batch_sizes[0]
        cases = condition.cases[: bench.options.timed_prompts]
        label = f"{condition.by} {condition.value:g}"
        timed = bench.race(dict(drafters), cases, size, bench.budget.left / (len(wanted) - races_done), label)
        repeats_plain = POLICIES[bench.decode.policy].repeats_plain(bench.sampling)
        for name in drafters:
            keys = race_keys(timed, name)
            keys["exact_matches"] = keys["exact_matches"] if repeats_plain else None
            slices_by_name[name].append({"by": condition.by, "value": condition.value, "batch_size": size} | keys)
    return slices_by_name


def at_temperature(decode: DecodeOptions, temperature: float) -> DecodeOptions:
    """The decode options at another temperature, with a policy for that temperature."""
    if temperature == 0.0:
        return replace(decode, policy="greedy", temperature=0.0)
    return replace(decode, policy=decode.policy if POLICIES[decode.policy].above_zero else "lossless", temperature=temperature)


def _contexts(bench: Bench) -> list[Condition]:
    max_prompt_tokens = bench.loaded.target.shape.max_positions - bench.decode.max_new_tokens
    fitting = [length for length in bench.options.contexts if length <= max_prompt_tokens]
    if dropped_lengths := sorted(set(bench.options.contexts) - set(fitting)):
        lengths = ", ".join(f"{length:,}" for length in dropped_lengths)
        bench.budget.notes.append(f"contexts of {lengths} tokens were left out: the target has room for {max_prompt_tokens:,}")
    if not fitting:
        return []
    documents = read_documents(bench.options.documents)
    context_conditions = []
    for length in fitting:
        prompts = long_prompts(bench.loaded.tokenizer, documents, length, LONG)
        if len(prompts) < LONG:
            bench.budget.notes.append(
                f"only {len(prompts)} documents have {length:,} tokens; give more with measure.documents=PATH"
            )
        if prompts:
            cases = [Case(name, "context", tokens) for name, tokens in prompts]
            context_conditions.append(Condition("context", length, bench, cases))
    return context_conditions
