"""Runs in TensorBoard, MLflow and trackio, by their own clients. None of their failures ends a training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json
from drafttrain.train import LoggerOptions
from drafttrain.train.wandb_run import ANSWER, Say, bounded, reason

MLFLOW = "mlflow.json"  # in the run's directory: the id of its MLflow run
LONGEST = 500  # characters of a parameter in MLflow


class Tracker(Protocol):
    """A run at a service. Its methods may raise anything."""

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
