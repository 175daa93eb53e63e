"""A row of the comparison: one measured checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafttrain.measure.compare.runs import RunReport

FLOPS, HOURS, TOKENS = "flops", "hours", "tokens"
UNVARIED = ("output", "name", "recipe", "resume", "logger", "launcher", "measure", "out", "runs")  # do not affect the drafter


@dataclass(frozen=True, slots=True)
class Row:
    """One measured checkpoint."""

    label: str  # its name in the table
    run: RunReport
    entry: dict[str, Any]  # its figures in the report
    varied: dict[str, Any]  # its values of the settings in which the runs differ

    @property
    def family(self) -> str:
        return str(self.run.report["drafter"].get("family", "-"))

    @property
    def training(self) -> dict[str, Any]:
        """The cost of training up to this checkpoint; empty where it was not recorded."""
        if (recorded := self.entry.get("training")) is not None:
            return dict(recorded)
        run_training = self.run.report.get("training") or {}
        last = max((e["step"] or 0) for e in self.run.report["checkpoints"])
        return dict(run_training) if run_training and (self.entry["step"] or 0) == last else {}

    def cost(self, kind: str) -> float | None:
        """Training cost: floating-point operations, hours of all processes together, or tokens read; None if unknown."""
        if kind == HOURS:
            seconds = self.training.get("process_seconds")
            return None if seconds is None else seconds / 3600
        value = self.training.get({FLOPS: "flops", TOKENS: "tokens"}[kind])
        return None if value is None else float(value)

    def counts(self) -> dict[str, NDArray[np.float64]] | None:
        """By prompt: (emitted, verifications); None in reports of version 1."""
        return self._by_prompt(("emitted", "verifications"))

    def times(self) -> dict[str, NDArray[np.float64]] | None:
        """By timed prompt: (plain ms, plain tokens after the first, speculative ms, speculative tokens after the first).

        None in reports of version 1.
        """
        by_prompt = self._by_prompt(("baseline_decode_ms", "baseline_tokens", "decode_ms", "tokens"))
        return None if by_prompt is None else {key: x - np.array([0.0, 1.0, 0.0, 1.0]) for key, x in by_prompt.items()}

    def _by_prompt(self, keys: Sequence[str]) -> dict[str, NDArray[np.float64]] | None:
        prompts = self.entry.get("per_prompt") or []
        if not prompts or any("prompt" not in p for p in prompts):
            return None
        complete = [p for p in prompts if all(p.get(key) is not None for key in keys)]
        return {f"{p['question_id']} {p['prompt']}": np.array([float(p[key]) for key in keys]) for p in complete} or None


def rows_of(runs: Sequence[RunReport], checkpoints: str) -> list[Row]:
    """A row for each run's best checkpoint, or for each checkpoint, with distinct labels."""
    varied_keys = varied([run.config for run in runs if run.config])
    pairs = [(run, entry) for run in runs for entry in _chosen(run, checkpoints)]
    labels = _labels(pairs)
    return [
        Row(label, run, entry, {key: run.config[key] for key in varied_keys if key in run.config})
        for label, (run, entry) in zip(labels, pairs, strict=True)
    ]


def _chosen(run: RunReport, checkpoints: str) -> list[dict[str, Any]]:
    entries = run.report["checkpoints"]
    if run.checkpoint is not None:
        return [e for e in entries if e["name"].split()[0] == run.checkpoint]
    return [e for e in entries if checkpoints == "all" or e["name"] == run.report["best"]]


def _labels(pairs: Sequence[tuple[RunReport, dict[str, Any]]]) -> list[str]:
    """The runs' names, and the checkpoint's name where a run has several rows."""
    short, count = names_of([run.where for run, _ in pairs]), Counter(run.where for run, _ in pairs)
    return [f"{short[run.where]} {entry['name']}" if count[run.where] > 1 else short[run.where] for run, entry in pairs]


def names_of(paths: Sequence[str]) -> dict[str, str]:
    """The shortest ends of the paths that tell them apart, of two parts at least."""
    parts = {path: Path(path).parts for path in paths}
    length = next((n for n in range(2, 64) if len({components[-n:] for components in parts.values()}) == len(parts)), 64)
    return {path: "/".join(components[-length:]) for path, components in parts.items()}


def varied(configs: Iterable[dict[str, Any]]) -> list[str]:
    """Settings that all runs have and in which they differ."""
    configs = list(configs)
    shared = [key for key in configs[0] if all(key in c for c in configs)] if configs else []
    if len({c.get("drafter.family") for c in configs}) > 1:  # the table has a column for it, and families have different keys
        shared = [key for key in shared if not key.startswith("drafter.")]
    of_interest = [key for key in shared if key.split(".")[0] not in UNVARIED]
    return [key for key in of_interest if any(c[key] != configs[0][key] for c in configs)]
