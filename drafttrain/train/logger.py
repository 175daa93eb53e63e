"""Logs a run's figures: always to metrics.jsonl, and to W&B and other trackers as configured. Rank 0 only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from drafttrain.core.files import atomic_write_text
from drafttrain.measure.compare.runs import flat
from drafttrain.train import LoggerOptions
from drafttrain.train.lineage import (
    COLUMNS,
    Lineage,
    checkpoint_artifact,
    continued_run,
    group_of,
    measurement_rows,
    run_of,
    summary_of,
)
from drafttrain.train.trackers import TRACKERS, GuardedTracker, check_installed
from drafttrain.train.wandb_run import ANSWER, Say, start


class Logger:
    """Logs figures as JSON lines and to trackers. W&B is offline unless the user is logged in; no failure ends a training.

    kept_steps: the steps of a resumed run's checkpoint, else 0. say: prints a line.
    """

    def __init__(
        self, options: LoggerOptions, run_dir: Path, config: dict[str, Any], kept_steps: int, say: Say = print
    ) -> None:
        self.file = run_dir / "metrics.jsonl"
        kept_lines = _drop_after(self.file, kept_steps)
        self._lines = self.file.open("a", encoding="utf-8")
        self.options = replace(options, group=options.group or group_of(config))
        self.last, name = kept_steps, f"{run_dir.parent.name}/{run_dir.name}"
        resumed = continued_run(run_dir, options.project, options.entity)
        self.run = start(self.options, run_dir, config, name, "fit", say, resumed)
        arguments = (self.options, run_dir, flat(config), name, kept_steps)
        trackers = [tracker for tracker in dict.fromkeys((options.name, *options.also)) if tracker in TRACKERS]
        self.trackers = [
            GuardedTracker(tracker, partial(TRACKERS[tracker], *arguments), say, options.finish_timeout) for tracker in trackers
        ]
        if self.run is None:
            return
        raw = self.run.raw
        lineage = Lineage(raw, options.artifacts)
        lineage.record_run(run_dir)
        # their step is earlier than that of the line
        self.run.attempt("metrics", lambda: raw.define_metric("engine/*", step_metric="engine/step"))
        self.run.attempt("artifacts", lambda: lineage.uses_data(config["data"]), ANSWER)
        for line in kept_lines:
            self.run.log(line["step"], _figures(line))

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the figures of one training step."""
        values = plain_json(dict(values))
        self._lines.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._lines.flush()
        self.last, figures = step, _figures(values)
        if self.run is not None:
            self.run.log(step, figures)
        for tracker in self.trackers:
            tracker.log(step, figures)

    def report(self, report: dict[str, Any], plots: list[Path], checkpoints: list[Path], files: list[Path]) -> None:
        """Log the measurement: summary, table, pictures and artifacts."""
        for tracker in self.trackers:
            tracker.report(self.last, summary_of(report), plots)
        if self.run is None:
            return
        raw = self.run.raw
        lineage = Lineage(raw, self.options.artifacts)
        self.run.attempt("pictures", lambda: raw.log(_shown(report, plots)))
        # last, because each step that W&B takes in sets the summary of its figures, such as expected_tau
        self.run.attempt("figures", lambda: raw.summary.update(summary_of(report)))
        self.run.attempt("artifacts", lambda: lineage.made_checkpoints(checkpoints, report))
        self.run.attempt("artifacts", lambda: lineage.made_report(files))

    def close(self, failed: bool = False) -> None:
        """End the log. failed: the run was interrupted, or ended with an error."""
        self._lines.close()
        for tracker in self.trackers:
            tracker.finish(failed)
        if self.run is not None:
            self.run.finish(failed)


def log_export(
    options: LoggerOptions, config: dict[str, Any], checkpoint: Path, folders: Mapping[str, Path], say: Say = print
) -> None:
    """Log an export as a separate W&B run that used the checkpoint and made `folders` (by stack).

    Nothing is logged if the checkpoint's own run is not at W&B, or logger.artifacts is none. say: prints a line.
    """
    made_by = run_of(checkpoint)
    if made_by is None or options.artifacts == "none":
        return
    check_installed([options.name, *options.also])
    group = options.group or made_by.get("group") or group_of(config)
    options = replace(options, group=group, project=made_by.get("project") or options.project)
    run = start(options, checkpoint.absolute().parent.parent, config, f"export {checkpoint.name}", "export", say)
    if run is None:
        return
    lineage = Lineage(run.raw, options.artifacts)
    run.attempt("artifacts", lambda: lineage.uses_checkpoint(checkpoint, made_by), ANSWER)
    for stack, folder in folders.items():
        name = checkpoint_artifact(str(made_by["id"]), checkpoint)
        run.attempt("artifacts", partial(lineage.made_export, folder, stack, name))
    run.finish(failed=False)


def _shown(report: Mapping[str, Any], plots: list[Path]) -> dict[str, Any]:
    """The measurement's pictures and its table, as W&B shows them."""
    import wandb

    pictures = {f"report/{p.stem}": wandb.Image(str(p)) for p in plots}
    return pictures | {"report/measurement": wandb.Table(columns=list(COLUMNS), data=measurement_rows(report))}


def _figures(values: Mapping[str, Any]) -> dict[str, Any]:
    """A line's figures for W&B, by position where a figure has several values."""
    figures: dict[str, Any] = {}
    for key, value in values.items():
        if key == "step":
            continue
        if isinstance(value, list):
            figures |= {f"{key}/{i + 1}": v for i, v in enumerate(value)}
        else:
            figures[key] = value
    return {key: value for key, value in figures.items() if value is not None}


def plain_json(value: Any) -> Any:
    """The value with null for numbers that JSON does not have: NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain_json(inner) for key, inner in value.items()}
    return [plain_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _drop_after(file: Path, steps: int) -> list[dict[str, Any]]:
    """Remove lines of later steps, and incomplete lines. A resumed run writes the steps after its checkpoint again.

    A serving engine's figures of an earlier step stay, in a line of their own. Returns what stays.
    """
    if not file.exists():
        return []
    kept_lines: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = plain_json(json.loads(line))
            if values["step"] <= steps:
                kept_lines.append(values)
            elif values.get("engine/step", steps + 1) <= steps:
                engine_values = {key: value for key, value in values.items() if key.startswith("engine/")}
                kept_lines.append({"step": steps, **engine_values})
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    atomic_write_text(file, "".join(f"{json.dumps(line)}\n" for line in kept_lines))
    return kept_lines
