"""Logs a run's figures: always to metrics.jsonl, and to W&B and other trackers as configured. Rank 0 only.

A step's figures are summed over processes on the device, copied to the host without waiting for it, and logged a step later:
while the host reads and logs them, a GPU works on the next step. Shapes: K draft depths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.files import atomic_write_text
from drafttrain.measure.compare.runs import flat
from drafttrain.objective.losses import StepCounts
from drafttrain.train import LoggerOptions
from drafttrain.train.checkpoint_manager import Progress
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
from drafttrain.train.progress import RunningMeans, TrainingProgress
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


class ToHost:
    """Tensors on their way to the host. `read` waits for these copies, not for what the device was given after them."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [_started(x) for x in tensors]
        self._copied: torch.cuda.Event | None = None
        if any(x.is_cuda for x in tensors):
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[Tensor]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies


def _started(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) if x.is_cuda else x


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimiser step of all processes."""

    sums: ToHost  # loss; counts [6, K]; the gradient's norm
    supervised: int  # tokens
    rate: float
    tokens: int  # that it read
    stop: bool  # whether any process must stop after it
    left_out: int = 0  # rows with a value that was not finite
    refused: bool = False  # whether it changed nothing, whatever the gradient

    def values(self) -> dict[str, Any]:
        """The figures to log. Waits until they are on the host."""
        loss, counts_6K, norm = self.sums.read()
        values = {"loss": float(loss) / self.supervised if self.supervised else math.nan}
        values |= figures(StepCounts.unpacked(counts_6K))
        values |= {"lr": self.rate, "grad_norm": float(norm), "supervised_tokens": self.supervised}
        return values | ({"left_out": self.left_out} if self.left_out else {})


@dataclass(slots=True)
class LateLog:
    """Logs a step's figures at `flush`, which is called when the next step has been launched. logger: on rank 0 only."""

    progress: Progress
    logger: Logger | None
    bar: TrainingProgress
    every: int  # steps between the console's lines
    more: dict[str, Any] = field(default_factory=dict)  # further figures of the step that is not logged yet
    bad: int = 0  # logged steps in a row that changed nothing
    _running: RunningMeans = field(default_factory=RunningMeans)
    _waiting: tuple[int, StepResult] | None = None

    def add(self, step: int, taken: StepResult, more: dict[str, Any]) -> None:
        assert self._waiting is None, "a step is logged before the next one is added"
        self._waiting, self.more = (step, taken), more

    def flush(self) -> None:
        """Log the last step that was added, and record its loss."""
        if self._waiting is None:
            return
        (step, result), self._waiting = self._waiting, None
        values = result.values()
        self.progress.loss = values["loss"] if math.isfinite(values["loss"]) else None
        self.bad = 0 if 0 <= values["grad_norm"] < math.inf and not result.refused else self.bad + 1
        values |= self._running.step(values) | self.more
        if self.logger is not None:
            self.logger.step(step, values)
        self.bar.step(step, result.tokens, values, line=step % self.every == 0)


def figures(counts: StepCounts) -> dict[str, Any]:
    """The figures to log: top-1 agreement, expected acceptance and loss by position, and a chain's expected tau (greedy)."""

    def per(numerator_K: Tensor, denominator_K: Tensor) -> Tensor:
        return numerator_K / denominator_K.clamp_min(1.0)

    alpha_K = per(counts.alive_correct, counts.alive)
    return {
        "agreement": per(counts.correct, counts.total).tolist(),
        "expected_acceptance": per(counts.acceptance, counts.total).tolist(),
        "expected_tau": 1.0 + float(alpha_K.cumprod(0).sum()),
        "loss_by_position": per(counts.loss, counts.total).tolist(),
    }
