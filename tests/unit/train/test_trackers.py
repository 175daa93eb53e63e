"""What TensorBoard, MLflow and trackio get, read back by their own readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from drafttrain.core.errors import UserError
from drafttrain.train import LoggerOptions, logger
from drafttrain.train.logger import GuardedTracker, Logger, check_installed
from tests.runs import report

CONFIG = {"name": "medusa", "target": {"name": "hf", "path": "/models/Some-8B"}, "train": {"lr": 0.001}}


def logged(folder: Path, **options: Any) -> Path:
    """A run of two steps that is resumed after the first, and a measurement."""
    run = folder / "medusa" / "2026"
    run.mkdir(parents=True)
    for kept in (0, 1):
        logger = Logger(LoggerOptions(**options), run, CONFIG, kept)
        for step in range(kept + 1, 3):
            logger.step(step, {"loss": 4.0 / step + kept, "agreement": [0.5, 0.25], "mfu": None})
        if kept:
            Figure(figsize=(1, 1)).savefig(run / "speedup.png")
            logger.report(report(), [run / "speedup.png"], [], [])
        logger.close()
    return run


def test_tensorboard_gets_figures_once_pictures_and_measurement(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(logged(tmp_path, name="tensorboard") / "tensorboard"))  # type: ignore[no-untyped-call]
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 4.0), (2, 3.0)], "step 2 was made again"
    assert [event.value for event in found.Scalars("agreement/2")] == [0.25, 0.25]
    assert [(event.step, event.value) for event in found.Scalars("report/speedup")] == [(2, 1.5)]
    assert found.Tags()["images"] == ["report/speedup"]


def test_mlflow_gets_one_run_with_parameters_figures_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed; pip install mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", f"sqlite:///{tmp_path}/mlflow.db")
    logged(tmp_path, name="mlflow", project="drafts")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("drafts").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "medusa/2026")
    assert run.data.params == {"name": "medusa", "target.name": "hf", "target.path": "/models/Some-8B", "train.lr": "0.001"}
    assert run.data.metrics["report/speedup"] == 1.5 and run.data.metrics["loss"] == 3.0
    assert [file.path for file in client.list_artifacts(run.info.run_id, "report")] == ["report/speedup.png"]


def test_trackio_gets_one_run_with_figures(tmp_path: Path) -> None:
    trackio = pytest.importorskip("trackio", reason="trackio is not installed; pip install trackio")
    logged(tmp_path, name="none", also=["trackio"], project=tmp_path.name)
    (run,) = trackio.Api().runs(tmp_path.name)
    try:
        assert run.name == "medusa/2026" and run.config["train.lr"] == 0.001
    finally:
        run.delete()


def test_tracker_failure_is_said_once_and_ends_no_training() -> None:
    said, calls = list[str](), list[int]()

    class Failing:
        def log(self, step: int, figures: Any) -> None:
            calls.append(step)
            raise ConnectionError("no route to host\nand more")

    tracker = GuardedTracker("mlflow", Failing, said.append, 1.0)  # type: ignore[arg-type]
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0})
    tracker.report(2, {}, [])
    tracker.finish(failed=False)
    assert calls == [1]
    assert said == ["mlflow: no route to host; the rest of the run is not logged there, its own files have it"]


def test_tracker_that_is_not_installed_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "find_spec", lambda name: None)
    for options in (LoggerOptions(name="mlflow"), LoggerOptions(also=["mlflow"])):
        with pytest.raises(UserError, match="logger is mlflow, which is not installed; pip install mlflow"):
            check_installed([options.name, *options.also])
    check_installed(["wandb", "none"])
