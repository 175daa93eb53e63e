"""What two measurements must share before one may be called ahead of the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.measure.compare.rows import Row

SETTINGS = ("top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens", "stop")
SOFTWARE = ("drafttrain", "torch", "transformers")


def conditions(row: Row, digests: bool) -> dict[str, Any]:
    """What decided the figures beside the drafter. digests: name the prompts by their tokens, not by their file."""
    report, entry = row.found.report, row.entry
    target, environment, measure = report["target"], report["environment"], report["measure"]
    found = {
        "target": target.get("fingerprint") or target.get("path") or target.get("name"),
        "target's dtype": target.get("dtype"),
        "runner": target.get("runner"),
        "prompts": _prompts(row) if digests else f"{measure['prompts']} ({entry['prompts']})",
        "policy": entry["policy"],
        "temperature": entry["temperature"],
        "batch size": entry["batch_size"],
    }
    if entry["policy"] == "threshold":
        found["threshold"] = measure["decode"].get("threshold")
    guard = measure["decode"].get("guard") or {}
    if acting := {name: guard[name] for name in ("loop", "json") if guard.get(name, "off") != "off"}:
        found["guards"] = acting
    return found | _hardware(environment) | {key: measure["decode"].get(key) for key in SETTINGS}


def differences(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Conditions that the rows do not share, each with the values found."""
    digests = all(row.counts() is not None for row in rows)
    found = [conditions(row, digests) for row in rows]
    names = dict.fromkeys(name for each in found for name in each)
    values = {name: list({str(each.get(name)): each.get(name) for each in found}.values()) for name in names}
    return {name: several for name, several in values.items() if len(several) > 1}


def said(different: dict[str, list[Any]]) -> str:
    """`policy (greedy; lossless), batch size (1; 4)`."""
    return ", ".join(f"{name} ({'; '.join(map(str, values))})" for name, values in different.items())


def check_alike(rows: Sequence[Row], mixed: bool) -> list[str]:
    """Notes for the table. Raises UserError for rows that were measured under different conditions, unless `mixed`."""
    different = differences(rows)
    if different and not mixed:
        raise UserError(
            f"the runs were not measured alike, so no rank would mean anything; they differ in {said(different)}; "
            "each run's report.json holds its own; measure them alike, or set compare.mixed=true"
        )
    notes = [f"measured under different conditions, ranks mean little: {said(different)}"] if different else []
    versions = {name: list(dict.fromkeys(str(r.found.report["environment"].get(name)) for r in rows)) for name in SOFTWARE}
    if mixed_versions := {name: several for name, several in versions.items() if len(several) > 1}:
        notes.append(f"measured with different versions: {said(mixed_versions)}")
    return notes


def _hardware(environment: dict[str, Any]) -> dict[str, Any]:
    """On a GPU its name; on a CPU what sets its speed. Reports of version 1 do not name the processor."""
    if environment.get("accelerator"):
        return {"hardware": environment["accelerator"]}
    parts = [environment.get(key) for key in ("processor", "machine")]
    name = next((p for p in parts if p), environment.get("device"))
    return {"hardware": name, "cores": environment.get("cores"), "threads": environment.get("threads")}


def _prompts(row: Row) -> str:
    counts = row.counts() or {}
    digest = hashlib.sha256("\n".join(sorted(counts)).encode()).hexdigest()[:8]
    return f"{row.found.report['measure']['prompts']}, {len(counts)} of digest {digest}"
