"""Reads the training curves from a metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CURVES = {
    "loss": "Loss",
    "agreement": "Top-1 agreement",
    "expected": "Expected tau (chain, training batches), and measured (measure.every)",
}
Series = dict[str, list[tuple[float, float]]]


def read_curves(metrics: Path | None) -> dict[str, Series]:
    """The series that have points, by a name of `CURVES`; empty without a file."""
    text = metrics.read_text(encoding="utf-8") if metrics is not None and metrics.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    found = {
        "loss": _series(lines, {"loss": "loss"}),
        "agreement": _agreement(lines),
        "expected": _series(lines, {"expected_tau": "expected tau", "measured_tau": "measured tau"}),
    }
    return {name: series for name, series in found.items() if series}


def _agreement(lines: Sequence[dict[str, Any]]) -> Series:
    series: Series = {}
    for k in range(max((len(line.get("agreement") or ()) for line in lines), default=0)):
        points = [(line["step"], line["agreement"][k]) for line in lines if len(line.get("agreement") or ()) > k]
        series[f"position {k + 1}"] = [(float(x), float(y)) for x, y in points]
    return series


def _series(lines: Sequence[dict[str, Any]], names: dict[str, str]) -> Series:
    found: Series = {}
    for key, label in names.items():
        if points := [(float(x["step"]), float(x[key])) for x in lines if x.get(key) is not None]:
            found[label] = points
    return found
