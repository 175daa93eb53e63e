"""The sections of report.md on guards and monitors."""

from __future__ import annotations

from typing import Any

from drafttrain.decoding.guards.guard import JSON, LOOP
from drafttrain.measure import cells

QUALITY = ("loops", "stop_misses", "longest_repeat", "json_valid")


def guards_section(report: dict[str, Any]) -> str:
    """The section of report.md on guards; empty if no guard was on."""
    entries = [e for e in report["checkpoints"] if e.get("guards")]
    if not entries:
        return ""
    header = ["checkpoint", "policy", "category", "prompts", "actions on loops", "actions on JSON"]
    acted, quality = [], []
    for e in entries:
        for category in e["guards"]["categories"]:
            counts = [str(category[key]) for key in ("prompts", LOOP, JSON)]
            acted.append([e["name"], e["policy"], category["category"], *counts])
        for guard_state in ("with", "without"):
            figures = e["guards"][guard_state]
            counts = [cells.count(figures[key]) for key in (*QUALITY, "tokens")]
            quality.append([e["name"], guard_state, *counts, cells.number(figures["log_likelihood"], 3)])
    guard = entries[0]["guards"]
    actions = f"On a loop: {guard[LOOP]['action']}. On broken JSON: {guard[JSON]['action']}."
    lower = ["checkpoint", "guards", "loops", "no stop token", "longest repetition", "valid JSON", "tokens"]
    lower += ["log-likelihood per token"]
    return f"## Guards\n\n{actions}\n\n" + cells.rows(header, acted) + "\n\n" + cells.rows(lower, quality)


def monitors_section(report: dict[str, Any]) -> str:
    """The section of report.md on monitors, by category. Categories with zero counts are left out."""
    body = []
    for e in report["checkpoints"]:
        for category in e["monitors"].get("categories", ()):
            if (
                not any(category[f"{prefix}{key}"] for prefix in ("", "baseline_") for key in QUALITY)
                and not category["json_prompts"]
            ):
                continue
            pairs = [f"{cells.count(category[k])} ({cells.count(category[f'baseline_{k}'])})" for k in QUALITY]
            json_prompts = cells.count(category["json_prompts"] or None)
            body.append(
                [e["name"], e["policy"], category["category"], str(category["prompts"]), *pairs[:3], json_prompts, pairs[3]]
            )
    if not body:
        return ""
    header = ["checkpoint", "policy", "category", "prompts", "loops (plain)", "no stop token (plain)"]
    header += ["longest repetition (plain)", "asked for JSON", "valid JSON (plain)"]
    return "## Monitors by category\n\n" + cells.rows(header, body)
