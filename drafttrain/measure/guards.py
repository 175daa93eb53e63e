"""The report's keys on guards: how often guards acted, and the outputs' quality with and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drafttrain.decoding.guards import JSON, LOOP
from drafttrain.decoding.request import Result
from drafttrain.measure import GuardOptions
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import Case
from drafttrain.measure.entry import Evidence, Keys, monitor_keys
from drafttrain.measure.monitors import QUALITY, valid_json
from drafttrain.measure.quality import mean_log_likelihood


def valid_outputs(bench: Bench, cases: Sequence[Case], results: Sequence[Result]) -> list[bool | None]:
    """Whether each output is the JSON that its prompt asks for; None for prompts that ask for none."""
    tokenizer, fence = bench.loaded.tokenizer, bench.decode.guard.fence
    return [
        valid_json(str(tokenizer.decode(r.tokens, skip_special_tokens=True)), case.required, fence) if case.as_json else None
        for case, r in zip(cases, results, strict=True)
    ]


def without_guards(bench: Bench) -> Bench | None:
    """The bench with all guards off; None if none is on."""
    guard = bench.decode.guard
    if guard.loop == guard.json == "off":
        return None
    return replace(bench, decode=replace(bench.decode, guard=GuardOptions(fence=guard.fence)))


def guard_keys(bench: Bench, evidence: Evidence, free: Sequence[Result]) -> Keys:
    """The report's `guards`. free: the outputs without guards."""
    names = [case.category for case in evidence.cases]
    keys: Keys = {
        name: {
            "action": getattr(bench.decode.guard, name),
            "acted": _acted(evidence.speculative, name),
            "baseline_acted": _acted(evidence.plain, name),
        }
        for name in (LOOP, JSON)
    }
    keys["categories"] = []
    for category in dict.fromkeys(names):
        category_results = [
            r for r, case_category in zip(evidence.speculative, names, strict=True) if case_category == category
        ]
        keys["categories"].append(
            {"category": category, "prompts": len(category_results)} | {n: _acted(category_results, n) for n in (LOOP, JSON)}
        )
    keys["with"] = _quality(bench, evidence)
    keys["without"] = _quality(bench, replace(evidence, speculative=free, valid=valid_outputs(bench, evidence.cases, free)))
    return keys


def _acted(results: Sequence[Result], guard: str) -> int:
    return sum(act.guard == guard for result in results for act in result.acts)


def _quality(bench: Bench, evidence: Evidence) -> Keys:
    target, outputs = bench.loaded.target, [r.tokens for r in evidence.speculative]
    monitors = monitor_keys(evidence, target.stop_ids)
    log_likelihood = mean_log_likelihood(target, [c.tokens for c in evidence.cases], outputs, target.device)
    return {key: monitors[key] for key in QUALITY} | {"tokens": sum(map(len, outputs)), "log_likelihood": log_likelihood}
