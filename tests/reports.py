"""Reports of made-up figures, for pages and comparisons."""

from __future__ import annotations

from typing import Any

from drafttrain.decoding.request import Result
from drafttrain.measure.cases import Case
from drafttrain.measure.entry import Evidence


def slice_of(by: str, value: Any, tau: float, speedup: float | None, **more: Any) -> dict[str, Any]:
    figures = {"by": by, "value": value, "batch_size": 1, "prompts": 8, "tau": tau, "expected_tau": tau, "alpha": 0.7}
    rates = dict.fromkeys(("tokens_per_s", "baseline_tokens_per_s", "transformers_tokens_per_s"), 100.0)
    times = {"speedup": speedup, "speedup_min": speedup and speedup - 0.1, "speedup_max": speedup and speedup + 0.1}
    return figures | rates | times | {"exact_matches": 8} | more


def entry_of(step: int, tau: float, speedup: float) -> dict[str, Any]:
    """A checkpoint of a chain of two drafts, measured at batch sizes 1 and 4."""
    figures = slice_of("", "", tau, speedup) | {"step": step, "name": f"step-{step:05}", "path": f"run/step-{step:05}"}
    figures |= {"draft_ms": 0.5, "verify_ms": 2.0, "commit_ms": 0.25, "host_ms": 0.1, "plain_step_ms": 2.0}
    figures |= {"draft_cost": 0.25, "verify_cost": 1.0, "verify_nodes": 3.0, "floor_fraction": None}
    figures |= {"predicted_speedup": 1.92, "predicted_gap": 0.0, "predicted_gap_flagged": False}
    figures |= {"alpha_by_position": [[0.8, 0.75, 0.85], [0.6, 0.5, 0.7]], "rejection_overhead": 0.3, "verifications": 500}
    figures |= {"policy": "greedy", "temperature": 0.0, "expected_gap": 0.0, "expected_gap_flagged": False}
    figures |= {"timed_prompts": 8, "repeats": 3, "explained": 0, "unexplained": 0, "flags": []}
    figures |= {"transformers_exact_matches": 8, "transformers_unexplained": 0, "ttft_ms": 9.0, "tpot_ms": 1.2}
    figures |= {"baseline_ttft_ms": 9.0, "baseline_tpot_ms": 2.0, "distribution_p_value": None, "quality_delta": None}
    names = ("loops", "stop_misses", "longest_repeat")
    figures["monitors"] = {prefix + name: 0 for name in names for prefix in ("", "baseline_")}
    runs = [[2, " over the", " lazy"], [0, "", " dog"], [1, " and", " away"]]
    text = {"question_id": "7", "category": "code", "tau": 2.0, "exact": "same", "prompt": "The fox", "first": " jumps"}
    figures["samples"] = [text | {"runs": runs}, text | {"question_id": "8", "exact": None, "tau": None, "runs": []}]
    figures["slices"] = [slice_of("category", "code", tau, speedup), slice_of("category", "a longer name", tau - 0.3, None)]
    figures["slices"] += [slice_of("batch_size", 1, tau, speedup), slice_of("batch_size", 4, tau, 0.8, batch_size=4)]
    figures["slices"] += [slice_of("temperature", 1.0, tau - 0.2, 1.2), slice_of("context", 1024, tau, 1.1)]
    return figures


def engine_of(name: str, label: str, **more: Any) -> dict[str, Any]:
    """An engine of a report, timed at one batch size, with a tau of ours."""
    part = {"by": "batch_size", "value": 1, "speedup": 1.2, "speedup_min": 1.1, "speedup_max": 1.3, "tokens_per_s": 240.0}
    part |= {"baseline_tokens_per_s": 200.0, "ttft_ms": 5.0, "tpot_ms": 4.0, "baseline_ttft_ms": 5.0, "baseline_tpot_ms": 5.0}
    part |= {"verifications": 300, "drafted": 900, "accepted": 300, "tau": 2.0, "tau_here": 2.0, "tau_gap": 0.0}
    part |= {"accepted_by_position": [210, 90, 0], "alpha_by_position": [[0.7, 0.6, 0.8], [0.43, 0.3, 0.5]]}
    part |= {
        "alpha_by_position_here": [[0.71, 0.6, 0.8]],
        "tau_gap_flagged": False,
        "exact_matches": 8,
        "prompts": 8,
        "repeats": 3,
    }
    entry = {"engine": name, "label": label, "versions": {name: "1.0"}, "stack": name, "url": None, "dtype": "float32"}
    entry |= {"threads": 2, "error": None, "flags": [], "notes": [], "draft_length": 3, "batch_size": 1, "same_as_here": 8}
    figures = {key: value for key, value in part.items() if key not in ("by", "value")} | entry | more
    return figures | {"slices": [part]}


def report_of_figures() -> dict[str, Any]:
    """Two checkpoints, the second the best."""
    measure = {"minutes": 1.0, "seconds": 9.0, "prompts": "embedded", "notes": [], "decode": {"policy": "greedy"}}
    return {
        "schema_version": 1,
        "target": {"name": "embedded"},
        "drafter": {"family": "toy", "parameters": 9, "options": {}},
        "environment": {"device": "cpu"},
        "measure": measure,
        "checkpoints": [entry_of(1, 2.0, 1.3), entry_of(2, 2.4, 1.6)],
        "best": "step-00002",
        "engines": [engine_of("openvino", "OpenVINO GenAI"), engine_of("http", "HTTP endpoint", speedup=None, tau=None)],
        "training": None,
    }


def evidence_of(tokens: list[int], runs: list[int]) -> Evidence:
    """One output, with the accepted drafts of each verification."""
    lengths, left = [], len(tokens) - 1
    for drafts in runs:
        lengths.append(min(drafts + 1, left))
        left -= lengths[-1]
    result = Result(0, 1, tokens, verifications=len(runs), emitted=len(tokens) - 1, runs=runs, lengths=lengths)
    return Evidence([Case("1", "code", [65])], [result], [result], None, [], False, None, None)


def counted(entry: dict[str, Any]) -> dict[str, Any]:
    """What of a checkpoint's figures does not depend on the clock."""
    lines = [{key: value for key, value in line.items() if not key.endswith("_ms")} for line in entry["per_prompt"]]
    return {key: entry[key] for key in ("tau", "expected_tau", "accepted", "exact_matches", "samples")} | {"per_prompt": lines}
