"""The conditions that measurements must share before they can be ranked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.measure.compare.rows import Row

SETTINGS = ("top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens", "stop")
SOFTWARE = ("drafttrain", "torch", "transformers")


def conditions(row: Row, digests: bool) -> dict[str, Any]:
    """The conditions of a measurement, apart from the drafter. digests: identify prompts by their tokens, not by their file."""
    report, entry = row.run.report, row.entry
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
    """The conditions that the rows do not share, each with its values."""
    digests = all(row.counts() is not None for row in rows)
    found = [conditions(row, digests) for row in rows]
    names = dict.fromkeys(name for each in found for name in each)
    values = {name: list({str(each.get(name)): each.get(name) for each in found}.values()) for name in names}
    return {name: several for name, several in values.items() if len(several) > 1}


def listed(different: dict[str, list[Any]]) -> str:
    """`policy (greedy; lossless), batch size (1; 4)`."""
    return ", ".join(f"{name} ({'; '.join(map(str, values))})" for name, values in different.items())


def check_alike(rows: Sequence[Row], mixed: bool) -> list[str]:
    """Notes on different conditions. Raises UserError for rows measured under different conditions, unless `mixed`."""
    different = differences(rows)
    if different and not mixed:
        raise UserError(
            f"the runs were measured under different conditions and cannot be ranked; they differ in {listed(different)}; "
            "measure them under the same conditions (see each run's report.json), or set compare.mixed=true"
        )
    notes = [f"measured under different conditions, so ranks mean little: {listed(different)}"] if different else []
    versions = {name: list(dict.fromkeys(str(r.run.report["environment"].get(name)) for r in rows)) for name in SOFTWARE}
    if mixed_versions := {name: several for name, several in versions.items() if len(several) > 1}:
        notes.append(f"measured with different versions: {listed(mixed_versions)}")
    return notes


def _hardware(environment: dict[str, Any]) -> dict[str, Any]:
    """The GPU's name; on a CPU the processor, cores and threads. Reports of version 1 do not name the processor."""
    if environment.get("accelerator"):
        return {"hardware": environment["accelerator"]}
    parts = [environment.get(key) for key in ("processor", "machine")]
    name = next((p for p in parts if p), environment.get("device"))
    return {"hardware": name, "cores": environment.get("cores"), "threads": environment.get("threads")}


def _prompts(row: Row) -> str:
    counts = row.counts() or {}
    digest = hashlib.sha256("\n".join(sorted(counts)).encode()).hexdigest()[:8]
    return f"{row.run.report['measure']['prompts']}, {len(counts)} of digest {digest}"
