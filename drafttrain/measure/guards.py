"""The report's keys and sections on guards and monitors: how often guards acted, and the outputs' quality with and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drafttrain.decoding.guards.guard import JSON, LOOP
from drafttrain.decoding.request import Result
from drafttrain.measure import GuardOptions, cells
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import Case
from drafttrain.measure.entry import Evidence, Keys, monitor_keys
from drafttrain.measure.monitors import valid_json
from drafttrain.measure.quality import mean_log_likelihood

QUALITY = ("loops", "stop_misses", "longest_repeat", "json_valid")


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
        own = [r for r, of in zip(evidence.speculative, names, strict=True) if of == category]
        keys["categories"].append({"category": category, "prompts": len(own)} | {n: _acted(own, n) for n in (LOOP, JSON)})
    keys["with"] = _quality(bench, evidence)
    keys["without"] = _quality(bench, replace(evidence, speculative=free, valid=valid_outputs(bench, evidence.cases, free)))
    return keys


def _acted(results: Sequence[Result], guard: str) -> int:
    return sum(act.guard == guard for result in results for act in result.acts)


def _quality(bench: Bench, evidence: Evidence) -> Keys:
    target, outputs = bench.loaded.target, [r.tokens for r in evidence.speculative]
    found = monitor_keys(evidence, target.stop_ids)
    likely = mean_log_likelihood(target, [c.tokens for c in evidence.cases], outputs, target.device)
    return {key: found[key] for key in QUALITY} | {"tokens": sum(map(len, outputs)), "log_likelihood": likely}


def guards_section(report: dict[str, Any]) -> str:
    """The section of report.md on guards; empty if no guard was on."""
    entries = [e for e in report["checkpoints"] if e.get("guards")]
    if not entries:
        return ""
    header = ["checkpoint", "policy", "category", "prompts", "actions on loops", "actions on JSON"]
    acted, quality = [], []
    for e in entries:
        for part in e["guards"]["categories"]:
            counts = [str(part[key]) for key in ("prompts", LOOP, JSON)]
            acted.append([e["name"], e["policy"], part["category"], *counts])
        for which in ("with", "without"):
            q = e["guards"][which]
            counts = [cells.count(q[key]) for key in (*QUALITY, "tokens")]
            quality.append([e["name"], which, *counts, cells.number(q["log_likelihood"], 3)])
    guard = entries[0]["guards"]
    actions = f"On a loop: {guard[LOOP]['action']}. On broken JSON: {guard[JSON]['action']}."
    lower = ["checkpoint", "guards", "loops", "no stop token", "longest repetition", "valid JSON", "tokens"]
    lower += ["log-likelihood per token"]
    return f"## Guards\n\n{actions}\n\n" + cells.rows(header, acted) + "\n\n" + cells.rows(lower, quality)


def monitors_section(report: dict[str, Any]) -> str:
    """The section of report.md on monitors, by category. Categories with zero counts are left out."""
    body = []
    for e in report["checkpoints"]:
        for part in e["monitors"].get("categories", ()):
            if not any(part[f"{prefix}{key}"] for prefix in ("", "baseline_") for key in QUALITY) and not part["json_prompts"]:
                continue
            pairs = [f"{cells.count(part[k])} ({cells.count(part[f'baseline_{k}'])})" for k in QUALITY]
            json_prompts = cells.count(part["json_prompts"] or None)
            body.append([e["name"], e["policy"], part["category"], str(part["prompts"]), *pairs[:3], json_prompts, pairs[3]])
    if not body:
        return ""
    header = ["checkpoint", "policy", "category", "prompts", "loops (plain)", "no stop token (plain)"]
    header += ["longest repetition (plain)", "asked for JSON", "valid JSON (plain)"]
    return "## Monitors by category\n\n" + cells.rows(header, body)
