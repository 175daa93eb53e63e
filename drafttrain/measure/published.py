"""Figures that others have published for a public prompt set and the same family, beside those measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafttrain.measure import cells

FILE = Path(__file__).parent / "published.json"
CAUTION = "Target, hardware and engine differ: only the order of magnitude compares."


def published_for(report: dict[str, Any], sets: set[str | None]) -> list[dict[str, Any]]:
    """The report's `published`: of the best checkpoint, for each set that the prompts are of, whatever is known of the family.

    sets: of all prompts; None among them: of none. A set's own figures are the checkpoint's where it is the only one.
    """
    best = next(entry for entry in report["checkpoints"] if entry["name"] == report["best"])
    measured = {part["value"]: part for part in best["slices"] if part["by"] == "set"} or dict.fromkeys(sets, best)
    drafter, found = report["drafter"], []
    for known in json.loads(FILE.read_text(encoding="utf-8")):
        options = known["options"].items()
        if known["family"] != drafter.get("family") or known["set"] not in measured:
            continue
        if any((drafter.get("options") or {}).get(key) != value for key, value in options):
            continue
        ours = measured[known["set"]]
        kept = {key: known[key] for key in ("set", "method", "target", "hardware", "tau", "speedup", "source")}
        found.append(kept | {"measured_tau": ours["tau"], "measured_speedup": ours["speedup"]})
    return found


def published_lines(report: dict[str, Any]) -> list[str]:
    """For the console: a line a figure."""
    lines = [
        f"{p['set']}: tau {cells.number(p['measured_tau'])}, speedup {cells.number(p['measured_speedup'])}; published for "
        f"{p['method']}: {p['tau']:.2f}, {p['speedup']:.2f} ({p['target']}, {p['hardware']})"
        for p in report.get("published") or ()
    ]
    return [*lines, CAUTION] if lines else []


def published_section(report: dict[str, Any]) -> str:
    """Of report.md; empty where nothing is known."""
    known = report.get("published") or []
    if not known:
        return ""
    header = ["set", "tau here", "speedup here", "published for", "tau", "speedup", "target", "hardware", "source"]
    body = [
        [
            *(p["set"], cells.number(p["measured_tau"]), cells.number(p["measured_speedup"]), p["method"]),
            *(cells.number(p["tau"]), cells.number(p["speedup"]), p["target"], p["hardware"], p["source"]),
        ]
        for p in known
    ]
    return f"## Beside published figures\n\n{CAUTION}\n\n" + cells.rows(header, body)
