"""A serving engine's measurements during training, in the log, the report and the curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafttrain.core.files import atomic_write_json
from drafttrain.drafters.checkpoint import checkpoint_name
from drafttrain.measure.engine_report import during_training
from drafttrain.measure.plots import engine_steps, read_curves
from drafttrain.train import LoggerOptions
from drafttrain.train.checkpoint_manager import PROGRESS, best_checkpoint, engine_figures, store_engine_figures
from drafttrain.train.logger import Logger


def figures(step: int, tau: float) -> dict[str, Any]:
    found = {"name": "vllm", "version": "0.32.0", "step": step, "tau": tau, "own_tau": tau + 0.1, "acceptance": 0.4}
    return found | {"prompts": 8, "draft_length": 5, "seconds": 61.0}


def logged(step: int, tau: float) -> dict[str, Any]:
    return {f"engine/{name}": value for name, value in figures(step, tau).items()}


def write(file: Path, *lines: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_engine_steps_figures_are_assigned_to_measured_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    late = {"step": 25, "loss": 1.0, "expected_tau": 2.0} | logged(20, 2.1)
    write(file, {"step": 20, "loss": 1.5, "expected_tau": 1.9, "measured_tau": 2.4}, late, {"step": 25} | logged(25, 2.2))
    steps = engine_steps(file)
    assert [(s["step"], s["tau"], s["measured_tau"]) for s in steps] == [(20, 2.1, 2.4), (25, 2.2, None)]
    curves = read_curves(file)["expected"]
    assert curves["tau in vllm"] == [(20.0, 2.1), (25.0, 2.2)]
    assert curves["our tau, same chains"] == [(20.0, 2.2), (25.0, 2.3000000000000003)]
    entry = {"step": 25, "tau": 2.5, "training": {"held_out_tau": 2.3}}
    with_report = read_curves(file, [entry | {"tuned": True}, entry | {"tau": 9.0, "tuned": False}])["expected"]
    added = {"expected tau, held-out conversations": [(25.0, 2.3)], "measured tau, report": [(25.0, 2.5)]}
    assert with_report == curves | added
    section = during_training({"training": {"engine": steps}})
    assert "| 20 | 2.10 | 2.20 | 2.40 | 40% | 61 |" in section and "| 25 | 2.20 | 2.30 | - |" in section
    assert during_training({"training": None}) == during_training({"training": {}}) == ""


def test_logger_resume_keeps_engine_figures_of_kept_steps(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write(
        file,
        {"step": 20, "loss": 1.5},
        {"step": 25, "loss": 1.0} | logged(20, 2.1),
        {"step": 35, "loss": 1.0} | logged(30, 2.2),
    )
    Logger(LoggerOptions(name="none"), tmp_path, {}, 22).close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"step": 20, "loss": 1.5}, {"step": 22} | logged(20, 2.1)]


def test_best_checkpoint_by_engine_uses_tau_measured_by_engine(tmp_path: Path) -> None:
    for step, measured in ((10, 2.0), (20, 2.2), (30, 2.1)):
        (tmp_path / checkpoint_name(step)).mkdir()
        atomic_write_json(tmp_path / checkpoint_name(step) / PROGRESS, {"step": step, "measured_tau": measured})
    assert best_checkpoint(tmp_path, by_engine=True).name == "step-00020", "the engine has measured none"
    store_engine_figures(tmp_path, 10, figures(10, 2.3))
    store_engine_figures(tmp_path, 30, figures(30, 2.4))
    store_engine_figures(tmp_path, 40, figures(40, 3.0))  # no checkpoint of this step
    assert best_checkpoint(tmp_path, by_engine=True).name == "step-00030"
    assert best_checkpoint(tmp_path).name == "step-00020"
    (tmp_path / "step-00030" / "engine.json").write_text("{")
    assert engine_figures(tmp_path / "step-00030") is None
    assert best_checkpoint(tmp_path, by_engine=True).name == "step-00010"
