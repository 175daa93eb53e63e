"""Reads the training curves from a metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CURVES = {
    "loss": "Loss",
    "agreement": "Top-1 agreement",
    "expected": "Tau: expected (chain) and measured",
}
ENGINE = "engine/"  # begins the keys of a serving engine's figures
SAME_CHAINS = "our tau, same chains"  # mostly equal to the engine's
Series = dict[str, list[tuple[float, float]]]


def read_curves(metrics: Path | None) -> dict[str, Series]:
    """The series that have points, by a name of `CURVES`; empty without a file."""
    lines = _lines(metrics)
    curves = {
        "loss": _series(lines, {"loss": "loss"}),
        "agreement": _agreement(lines),
        "expected": _series(lines, {"expected_tau": "expected tau", "measured_tau": "measured tau"}) | _by_engine(metrics),
    }
    return {name: series for name, series in curves.items() if series}


def engine_steps(metrics: Path | None) -> list[dict[str, Any]]:
    """The measurements of a serving engine during training, by step, with our own tau of the step (`measured_tau`)."""
    lines = _lines(metrics)
    ours = {line["step"]: line["measured_tau"] for line in lines if "measured_tau" in line}
    by_step = {line[f"{ENGINE}step"]: line for line in lines if f"{ENGINE}step" in line}
    return [
        {key.removeprefix(ENGINE): value for key, value in line.items() if key.startswith(ENGINE)}
        | {"measured_tau": ours.get(step)}
        for step, line in sorted(by_step.items())
    ]


def _by_engine(metrics: Path | None) -> Series:
    """The tau of an engine during training, and that of our decoder with the same chains."""
    steps = engine_steps(metrics)
    names = {"tau": f"tau in {steps[-1]['name']}", "own_tau": SAME_CHAINS} if steps else {}
    return _series(steps, names)


def _lines(metrics: Path | None) -> list[dict[str, Any]]:
    text = metrics.read_text(encoding="utf-8") if metrics is not None and metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _agreement(lines: Sequence[dict[str, Any]]) -> Series:
    series: Series = {}
    for k in range(max((len(line.get("agreement") or ()) for line in lines), default=0)):
        points = [(line["step"], line["agreement"][k]) for line in lines if len(line.get("agreement") or ()) > k]
        if defined_points := [(float(x), float(y)) for x, y in points if y is not None]:
            series[f"position {k + 1}"] = defined_points
    return series


def _series(lines: Sequence[dict[str, Any]], names: dict[str, str]) -> Series:
    series: Series = {}
    for key, label in names.items():
        if points := [(float(x["step"]), float(x[key])) for x in lines if x.get(key) is not None]:
            series[label] = points
    return series
