"""Slices beside category and batch size: other temperatures, and contexts of a given length; a race for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drafttrain.data.documents import long_prompts, read_documents
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.measure import DecodeOptions
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import Case
from drafttrain.measure.entry import Keys, race_keys
from drafttrain.model.drafter import Drafter

LONG = 4  # prompts of each context length: their prefill is what takes the time


@dataclass(frozen=True, slots=True)
class Condition:
    """A slice's name and value, and what is raced for it at the first batch size."""

    by: str
    value: Any
    bench: Bench
    cases: Sequence[Case]


def conditions(bench: Bench, cases: Sequence[Case]) -> list[Condition]:
    """Those that the options ask for and the target allows; notes say what was left out. Raises UserError for documents that
    cannot be read."""
    found = [
        Condition("temperature", temperature, replace(bench, decode=at_temperature(bench.decode, temperature)), cases)
        for temperature in bench.options.temperatures
        if temperature != bench.decode.temperature
    ]
    if bench.options.contexts:
        found += _contexts(bench)
    return found


def other_slices(asked: Sequence[Condition], drafters: Mapping[str, Drafter]) -> dict[str, list[Keys]]:
    """By drafter. Each condition has an equal share of what is left of the budget."""
    found: dict[str, list[Keys]] = {name: [] for name in drafters}
    for done, condition in enumerate(asked):
        bench = condition.bench
        size = bench.options.batch_sizes[0]
        cases = condition.cases[: bench.options.timed_prompts]
        label = f"{condition.by} {condition.value:g}"
        timed = bench.race(dict(drafters), cases, size, bench.budget.left / (len(asked) - done), label)
        same = POLICIES[bench.decode.policy].repeats_plain(bench.sampling)
        for name in drafters:
            keys = race_keys(timed, name)
            keys["exact_matches"] = keys["exact_matches"] if same else None
            found[name].append({"by": condition.by, "value": condition.value, "batch_size": size} | keys)
    return found


def at_temperature(decode: DecodeOptions, temperature: float) -> DecodeOptions:
    """The same decoding at another temperature, by a policy that goes with it."""
    if temperature == 0.0:
        return replace(decode, policy="greedy", temperature=0.0)
    return replace(decode, policy=decode.policy if POLICIES[decode.policy].above_zero else "lossless", temperature=temperature)


def _contexts(bench: Bench) -> list[Condition]:
    room = bench.loaded.target.shape.max_positions - bench.decode.max_new_tokens
    fitting = [length for length in bench.options.contexts if length <= room]
    if left := sorted(set(bench.options.contexts) - set(fitting)):
        said = ", ".join(f"{length:,}" for length in left)
        bench.budget.notes.append(f"contexts of {said} tokens were left out: the target leaves room for {room:,}")
    if not fitting:
        return []
    documents = read_documents(bench.options.documents)
    found = []
    for length in fitting:
        prompts = long_prompts(bench.loaded.tokenizer, documents, length, LONG)
        if len(prompts) < LONG:
            bench.budget.notes.append(f"{len(prompts)} documents have {length:,} tokens; give more with measure.documents=PATH")
        if prompts:
            cases = [Case(name, "context", tokens) for name, tokens in prompts]
            found.append(Condition("context", length, bench, cases))
    return found
