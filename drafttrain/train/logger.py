"""Logs a run's figures: always to metrics.jsonl, and to W&B and other trackers as configured. Rank 0 only.

A step's figures are summed over processes on the device, copied to the host without waiting for it, and logged a step later:
while the host reads and logs them, a GPU works on the next step. Shapes: K draft depths.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, atomic_write_text
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
from drafttrain.train.wandb_run import ANSWER, Say, bounded, reason, start

MLFLOW = "mlflow.json"  # in the run's directory: the id of its MLflow run
LONGEST = 500  # characters of a parameter in MLflow


class Tracker(Protocol):
    """A run at a service (TensorBoard, MLflow, trackio), by its own client.

    Methods may raise anything: a `GuardedTracker` lets no failure end a training.
    """

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take in the figures of a step."""

    def report(self, step: int, summary: Mapping[str, float], pictures: Sequence[Path]) -> None:
        """Take in the measurement at the end of training."""

    def finish(self, failed: bool) -> None:
        """End the run. failed: it was interrupted, or ended with an error."""


class TensorBoard:
    """Event files in `tensorboard/` of the run's directory."""

    def __init__(self, options: LoggerOptions, folder: Path, config: Mapping[str, Any], name: str, kept: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=kept + 1)
        if not kept:
            self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for key, value in figures.items():
            self._writer.add_scalar(key, value, step)

    def report(self, step: int, summary: Mapping[str, float], pictures: Sequence[Path]) -> None:
        from matplotlib.image import imread

        self.log(step, summary)
        for path in pictures:
            self._writer.add_image(f"report/{path.stem}", imread(path), step, dataformats="HWC")

    def finish(self, failed: bool) -> None:
        self._writer.close()


class MLflow:
    """A run of the experiment `logger.project`, at MLFLOW_TRACKING_URI or where MLflow writes without."""

    def __init__(self, options: LoggerOptions, folder: Path, config: Mapping[str, Any], name: str, kept: int) -> None:
        from mlflow import MlflowClient

        self._client, file = MlflowClient(), folder / MLFLOW
        if file.exists():
            self._id = json.loads(file.read_text(encoding="utf-8"))["run_id"]
            self._client.update_run(self._id, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(options.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(options.project)
        self._id = self._client.create_run(experiment_id, run_name=name).info.run_id
        atomic_write_json(file, {"run_id": self._id})
        for key, value in config.items():
            self._client.log_param(self._id, key, str(value)[:LONGEST], synchronous=False)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        timestamp_ms = int(1000 * time.time())
        metrics = [Metric(key, value, timestamp_ms, step) for key, value in figures.items()]
        self._client.log_batch(self._id, metrics, synchronous=False)

    def report(self, step: int, summary: Mapping[str, float], pictures: Sequence[Path]) -> None:
        self.log(step, summary)
        for path in pictures:
            self._client.log_artifact(self._id, str(path), "report")

    def finish(self, failed: bool) -> None:
        from mlflow import flush_async_logging

        flush_async_logging()
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Trackio:
    """A run of the project `logger.project`, on this machine, or in the Space of the hub that TRACKIO_SPACE_ID names."""

    def __init__(self, options: LoggerOptions, folder: Path, config: Mapping[str, Any], name: str, kept: int) -> None:
        import trackio

        space_id = os.environ.get("TRACKIO_SPACE_ID")
        self._picture = trackio.Image
        self._run = trackio.init(
            options.project, name=name, group=options.group, config=dict(config), resume="allow", space_id=space_id, embed=False
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def report(self, step: int, summary: Mapping[str, float], pictures: Sequence[Path]) -> None:
        images = {f"report/{path.stem}": self._picture(str(path)) for path in pictures}
        self._run.log(dict(summary) | images, step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "trackio": Trackio}


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is missing."""
    for name in names:
        if name in TRACKERS and find_spec(name) is None:
            raise UserError(f"logger is {name}, which is not installed; pip install {name}, or choose another logger")


class GuardedTracker:
    """A tracker that is said and left alone after its first failure, and that is never waited for without end."""

    def __init__(self, name: str, start: Callable[[], Tracker], say: Say, finish_timeout: float) -> None:
        self.name, self.say, self.finish_timeout = name, say, finish_timeout
        self._tracker: Tracker | None = None

        def begin() -> None:
            self._tracker = start()

        self._attempt(begin, ANSWER)

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Log the numbers among the figures of a step."""
        if (tracker := self._tracker) is not None:
            self._attempt(lambda: tracker.log(step, numbers(figures)))

    def report(self, step: int, summary: Mapping[str, Any], pictures: Sequence[Path]) -> None:
        """Log the measurement."""
        if (tracker := self._tracker) is not None:
            metrics = {f"report/{key}": value for key, value in numbers(summary).items()}
            self._attempt(lambda: tracker.report(step, metrics, pictures), ANSWER)

    def finish(self, failed: bool) -> None:
        """End the run and wait for it, no longer than `finish_timeout`."""
        if (tracker := self._tracker) is not None:
            self._attempt(lambda: tracker.finish(failed), self.finish_timeout or None)

    def _attempt(self, call: Callable[[], None], seconds: float | None = 0.0) -> None:
        """Call the tracker; with seconds, in a thread that is waited for no longer."""
        try:
            call() if seconds == 0.0 else bounded(call, seconds)
        except Exception as error:  # they raise many kinds, and none of them may end a training
            self._tracker = None
            self.say(f"{self.name}: {reason(error)}; the rest of the run is not logged there, its own files have it")


def numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures that are numbers."""
    return {key: float(value) for key, value in figures.items() if isinstance(value, int | float)}


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
