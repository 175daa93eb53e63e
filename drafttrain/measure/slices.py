"""Slices by temperature and by context length, with a race for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.intervals import tau_interval
from drafttrain.core.limits import count
from drafttrain.data.prompts import long_prompts, read_documents
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.decoding.request import Result
from drafttrain.measure import DecodeOptions
from drafttrain.measure.acceptance import pooled
from drafttrain.measure.bench import BASELINE, Bench
from drafttrain.measure.cases import Case
from drafttrain.measure.entry import Keys, acceptance_keys, counts_of, race_keys
from drafttrain.model.drafter import Drafter

LONG = 8  # prompts of each context length; their prefill takes most of the time
AUTO = (1024, 4096, 16384, 32768)  # context lengths of `auto`


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
    return race_conditions + _contexts(bench)


def other_slices(wanted: Sequence[Condition], drafters: Mapping[str, Drafter]) -> dict[str, list[Keys]]:
    """The slices of each drafter. Every condition gets an equal share of the remaining budget."""
    slices_by_name: dict[str, list[Keys]] = {name: [] for name in drafters}
    for races_done, condition in enumerate(wanted):
        bench = condition.bench
        size = bench.options.batch_sizes[0]
        cases = condition.cases[: bench.options.timed_prompts]
        label = f"{condition.by} {condition.value:g}"
        decoded = _decoded(bench, drafters, cases, size, label) if condition.by == "context" else None
        timed = bench.race(dict(drafters), cases, size, bench.budget.left / (len(wanted) - races_done), label)
        for name in drafters:
            keys = race_keys(timed, name)
            if decoded is not None:
                pairs = list(zip(decoded[name], decoded[BASELINE], strict=True))
                keys |= acceptance_keys(pooled(decoded[name]), None)
                keys |= {"prompts": len(pairs), "exact_matches": sum(a.tokens == b.tokens for a, b in pairs)}
                keys["tau_interval"] = tau_interval(counts_of(decoded[name]))
            if not POLICIES[bench.decode.policy].repeats_plain(bench.sampling):
                keys["exact_matches"] = None
            slices_by_name[name].append({"by": condition.by, "value": condition.value, "batch_size": size} | keys)
    return slices_by_name


def _decoded(
    bench: Bench, drafters: Mapping[str, Drafter], cases: Sequence[Case], size: int, label: str
) -> dict[str, list[Result]]:
    """The results of plain decoding and of each drafter. Acceptance by context is of all prompts, however few can be timed.

    The batch is that of the timings, because caches of long contexts are large.
    """
    bench = replace(bench, options=replace(bench.options, untimed_batch=size))
    for drafter in drafters.values():
        drafter.use_batch_size(size)
    contenders: dict[str, Drafter | None] = {BASELINE: None, **drafters}
    return {name: bench.decode_all(f"{name}: {label}", drafter, cases) for name, drafter in contenders.items()}


def at_temperature(decode: DecodeOptions, temperature: float) -> DecodeOptions:
    """The decode options at another temperature, with a policy for that temperature."""
    if temperature == 0.0:
        return replace(decode, policy="greedy", temperature=0.0)
    return replace(decode, policy=decode.policy if POLICIES[decode.policy].above_zero else "lossless", temperature=temperature)


def context_lengths(contexts: Any, room: int) -> list[int]:
    """The lengths of `measure.contexts`, ascending. room: tokens of the longest prompt. Raises UserError for a longer one."""
    lengths: set[int] = set()
    for each in contexts if isinstance(contexts, list) else [contexts]:
        lengths.update([length for length in AUTO if length <= room] if each == "auto" else [count(each)])
    if longer := [length for length in sorted(lengths) if length > room]:
        raise UserError(
            f"measure.contexts has {longer[0]:,}, but with decode.max_new_tokens the target has room for {max(room, 0):,}; "
            "leave out what is longer, or set auto"
        )
    return sorted(lengths)


def _contexts(bench: Bench) -> list[Condition]:
    lengths = context_lengths(bench.options.contexts, bench.loaded.target.shape.max_positions - bench.decode.max_new_tokens)
    documents = read_documents(bench.options.documents) if lengths else []
    context_conditions = []
    for length in lengths:
        prompts = long_prompts(bench.loaded.tokenizer, documents, length, LONG)
        if len(prompts) < LONG:
            bench.budget.notes.append(
                f"only {len(prompts)} documents have {length:,} tokens; give more with measure.documents=PATH"
            )
        if prompts:
            cases = [Case(name, "context", tokens) for name, tokens in prompts]
            context_conditions.append(Condition("context", length, bench, cases))
    return context_conditions
