"""Published figures for the same family and public prompt set, for comparison with the measured ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafttrain.measure import cells
from drafttrain.measure.flags import best_entry

PUBLISHED = Path(__file__).parent / "published.json"
CAUTION = "Target, hardware and engine differ: compare only the order of magnitude."


def published_for(report: dict[str, Any], sets: set[str | None]) -> list[dict[str, Any]]:
    """The report's `published`: for each public set, published figures of the family next to those of the best checkpoint.

    sets: the public sets that the prompts are from; None for other prompts.
    """
    best = best_entry(report)
    measured = {entry["value"]: entry for entry in best["slices"] if entry["by"] == "set"} or dict.fromkeys(sets, best)
    drafter, published = report["drafter"], []
    for figure in json.loads(PUBLISHED.read_text(encoding="utf-8")):
        options = figure["options"].items()
        if figure["family"] != drafter.get("family") or figure["set"] not in measured:
            continue
        if any((drafter.get("options") or {}).get(key) != value for key, value in options):
            continue
        ours = measured[figure["set"]]
        selected = {key: figure[key] for key in ("set", "method", "target", "hardware", "tau", "speedup", "source")}
        published.append(selected | {"measured_tau": ours["tau"], "measured_speedup": ours["speedup"]})
    return published


def published_lines(report: dict[str, Any]) -> list[str]:
    """Lines for the console, one per published figure."""
    lines = [
        f"{p['set']}: tau {cells.number(p['measured_tau'])}, speedup {cells.number(p['measured_speedup'])}; published for "
        f"{p['method']}: {p['tau']:.2f}, {p['speedup']:.2f} ({p['target']}, {p['hardware']})"
        for p in report.get("published") or ()
    ]
    return [*lines, CAUTION] if lines else []


def published_section(report: dict[str, Any]) -> str:
    """The section of report.md; empty without published figures."""
    published = report.get("published") or []
    if not published:
        return ""
    header = ["set", "tau here", "speedup here", "published for", "tau", "speedup", "target", "hardware", "source"]
    body = [
        [
            *(p["set"], cells.number(p["measured_tau"]), cells.number(p["measured_speedup"]), p["method"]),
            *(cells.number(p["tau"]), cells.number(p["speedup"]), p["target"], p["hardware"], p["source"]),
        ]
        for p in published
    ]
    return f"## Published figures\n\n{CAUTION}\n\n" + cells.rows(header, body)
