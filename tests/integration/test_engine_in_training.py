"""`measure.engine`: a serving engine measures the drafter while it trains. Here a stand-in takes the engine's place."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from drafttrain.cli.config import compose_run
from drafttrain.core.errors import UserError
from drafttrain.runs.training_engine import check_engine_options
from drafttrain.train.checkpoint_manager import best_checkpoint, engine_figures
from tests import forked
from tests.integration.test_training import arguments, digest, fit, kill_after, losses, once, reach

STANDIN = Path(__file__).parents[1] / "standin" / "engine.py"
STEPS = ("recipe=medusa", "train.steps=8", "train.checkpoint_every=4", "decode.max_new_tokens=12", "train.keep_last=5")
LONG = ("recipe=medusa", "train.steps=4000", "train.checkpoint_every=4000", "decode.max_new_tokens=12")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, ...]]:
    """Arguments for an engine whose Python runs the stand-in, which behaves in a named way."""
    python, prompts, record = tmp_path / "python", tmp_path / "prompts.jsonl", tmp_path / "record"
    python.write_text(f'#!/bin/sh\n[ "$2" = -c ] || exec "{sys.executable}" -P "$2" "{STANDIN}" "$4" "$5"\n')
    python.chmod(0o755)
    prompts.write_text("".join(json.dumps({"turns": [f"word {i}"]}) + "\n" for i in range(3)))
    record.mkdir()
    monkeypatch.setenv("RECORD", str(record))

    def asked(how: str) -> tuple[str, ...]:
        monkeypatch.setenv("STANDIN", how)
        return (
            "measure.every=3", "measure.every_prompts=2", f"prompts={prompts}", "measure.engine=vllm",
            f"engine_python={python}",
        )  # fmt: skip

    return asked


def recorded(tmp_path: Path) -> dict[int, dict[str, Any]]:
    """What the stand-ins had, by step."""
    return {int(file.stem): json.loads(file.read_text()) for file in (tmp_path / "record").glob("*.json")}


def engine_lines(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "engine/step" in line]


def training_losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def leftovers(output: Path) -> list[Path]:
    return list(output.rglob("*.tmp-*"))


def ended(process: int) -> bool:
    """Whether a process is gone in the end."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def measured_slowly(command: list[str], output: Path, lines: int, record: Path) -> forked.Forked:
    """A run whose engine is `slow`: its first measurement takes until metrics.jsonl has so many lines."""
    process = forked.start(command)
    reach(process, output, lines)
    (record / "go").touch()
    assert process.wait() == 0, process.said()
    return process


@pytest.mark.slow
@pytest.mark.sampled(more=[()])  # test_measured_training.py has two processes
@pytest.mark.parametrize("more", [(), ("launcher.nproc=2", "deepspeed=zero3")])
def test_measure_engine_keeps_training_unchanged_and_logs_measured_steps(
    more: tuple[str, ...], material: Path, tmp_path: Path, engine: Callable[[str], tuple[str, ...]]
) -> None:
    plain = once(material, *STEPS, *more)
    run = fit(material, tmp_path / "measured", *STEPS, *more, *engine("fast"))
    assert training_losses(run) == losses(plain) and digest(run) == digest(plain)
    lines = {line["engine/step"]: line for line in engine_lines(run)}
    assert set(lines) <= {3, 4, 6, 8} and 3 in lines and 8 in lines, "busy steps are skipped, the last one is not"
    for step, line in lines.items():
        assert line["step"] >= step and line["engine/tau"] == pytest.approx(10 / (4 + step % 10))
        assert line["engine/acceptance"] == 0.4 and line["engine/own_tau"] >= 1 and line["engine/prompts"] == 2
    figures = engine_figures(run / "checkpoints" / "step-00008")
    assert figures is not None and figures["tau"] == lines[8]["engine/tau"]
    assert not leftovers(tmp_path)
    for about in recorded(tmp_path).values():
        assert about["process"] == about["group"], "a session of its own"
        assert about["environment"]["OMP_NUM_THREADS"] == "1" and about["environment"]["CUDA_VISIBLE_DEVICES"] == ""
        names = about["environment"].keys()
        assert not [n for n in names if n in ("RANK", "WORLD_SIZE") or n.startswith(("MASTER_", "LOCAL_", "TORCHELASTIC_"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "more", "said"),
    [
        ("crash", (), "vLLM did not measure step 3: vLLM ended with 3 and no result: a bad day (log: "),
        ("hang", ("measure.engine_timeout=1",), "step 3: it had not ended after measure.engine_timeout=1 seconds"),
        ("slow", (), "vLLM still measures step 3, so it skips step 4"),
    ],
)
def test_measure_engine_failure_is_logged_once_and_training_continues(
    how: str, more: tuple[str, ...], said: str, material: Path, tmp_path: Path, engine: Callable[[str], tuple[str, ...]]
) -> None:
    lines = 7 if how == "slow" else 0  # one more than the last step that is skipped
    process = measured_slowly(arguments(material, tmp_path, *STEPS, *engine(how), *more), tmp_path, lines, tmp_path / "record")
    assert process.said().count(said) == 1 and "Traceback" not in process.said()
    (run,) = (file.parent for file in tmp_path.glob("*/*/run.json"))
    assert [line["engine/step"] for line in engine_lines(run)] == ([3, 8] if how == "slow" else [])
    assert (run / "logs" / "engine-00003.log").is_file() == (how != "slow") and not leftovers(tmp_path)
    assert all(ended(about["process"]) for about in recorded(tmp_path).values())


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("more", [(), ("launcher.nproc=2",)])
def test_measure_engine_process_ends_when_run_is_signalled(
    number: signal.Signals, more: tuple[str, ...], material: Path, tmp_path: Path, engine: Callable[[str], tuple[str, ...]]
) -> None:
    process = forked.start(arguments(material, tmp_path / "out", *LONG, *more, *engine("hang")))
    while process.poll() is None and not recorded(tmp_path):
        time.sleep(0.02)
    assert leftovers(tmp_path), "the export is there while the engine runs"
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.kill(process.pid, number)
        process.wait()
    (about,) = recorded(tmp_path).values()
    assert ended(about["process"]) and not leftovers(tmp_path), process.said()


@pytest.mark.slow
def test_measure_engine_resumed_run_measures_newest_checkpoint(
    material: Path, tmp_path: Path, engine: Callable[[str], tuple[str, ...]]
) -> None:
    output, steps = tmp_path / "out", ("train.steps=30", "train.checkpoint_every=6", "decode.max_new_tokens=12")
    asked = ("recipe=medusa", *steps, *engine("hang"), "resume=auto")
    kill_after(arguments(material, output, *asked), output, lines=8)
    newest = max(int(path.name.split("-")[1]) for path in output.glob("*/*/checkpoints/step-?????"))
    engine("fast")
    run = fit(material, output, *asked)
    measured = {line["engine/step"] for line in engine_lines(run)}
    assert newest in measured and 30 in measured and not leftovers(tmp_path)
    assert len(training_losses(run)) == 30


@pytest.mark.slow
def test_measure_engine_best_checkpoint_has_highest_engine_tau(
    material: Path, tmp_path: Path, engine: Callable[[str], tuple[str, ...]]
) -> None:
    keep = ("train.steps=6", "train.checkpoint_every=2", "train.keep_last=2", "measure.best=engine")
    command = arguments(material, tmp_path, "recipe=medusa", *keep, "decode.max_new_tokens=12", *engine("slow"))
    process = measured_slowly(command, tmp_path, 5, tmp_path / "record")
    (folder,) = tmp_path.glob("*/*/checkpoints")
    taus = {path.name: figures and figures["tau"] for path in folder.iterdir() if (figures := engine_figures(path)) or True}
    assert None not in taus.values(), "checkpoints that were skipped are measured at the end"
    assert best_checkpoint(folder, by_engine=True).name == max(taus, key=lambda name: taus[name] or 0.0)
    assert f"best checkpoint by vllm: {best_checkpoint(folder, by_engine=True).name}, tau" in process.said()


@pytest.mark.usefixtures("command")  # composes quickly
def test_check_engine_options_refuses_settings_of_no_effect_or_no_sense(subtests: pytest.Subtests) -> None:
    vllm = ("measure.every=2", "measure.engine=vllm")
    for asked, line in (
        (("measure.engine=vllm",), "measure.every is 0"),
        (("measure.every=2", "measure.best=engine"), "no engine measures during training"),
        ((*vllm, "decode=sampling"), "measured with greedy decoding"),
        ((*vllm, "measure.engine_device=cuda:1"), "the number of a GPU"),
    ):
        with subtests.test(asked=asked), pytest.raises(UserError, match=line):
            check_engine_options(compose_run("medusa", asked).options)


def test_measure_engine_invalid_options_are_refused_before_training(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    """Of the settings alone, of the family, of the engine, of the target."""
    for asked, line in (
        (("recipe=medusa", "measure.engine=vllm"), "measure.every is 0"),
        (("recipe=hydra", "measure.every=2", "measure.engine=transformers"), "hydra cannot be exported to transformers"),
        (("recipe=medusa", "measure.every=2", "measure.engine=vllm", "engine_python=none"), "engine_python is 'none'"),
        (("recipe=medusa", "measure.every=2", "measure.engine=vllm", "target.weights=int8"), "engines load whole ones"),
    ):
        with subtests.test(asked=asked):
            assert command("fit", "logger=none", "measure.enabled=false", "train.steps=1", "train.global_batch=2", *asked) == 2
            error = capsys.readouterr().err
            assert line in error and len(error.strip().splitlines()) == 1


def test_measure_engine_not_installed_error_names_install_command(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("recipe=medusa", "measure.every=2", "measure.engine=vllm")
    assert command("fit", "logger=none", "measure.enabled=false", "train.steps=1", "train.global_batch=2", *asked) == 2
    error = capsys.readouterr().err
    assert "install it (python3 -m venv .venv-engines/vllm" in error and len(error.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.grid  # unit/engines/test_measurement.py counts the same without a training
def test_measure_engine_transformers_tau_matches_decoder_tau(material: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"word {i} of many"]}) + "\n" for i in range(3)))
    asked = ("recipe=draft_model", "train.steps=4", "train.checkpoint_every=4", "decode.max_new_tokens=16")
    asked += ("measure.every=2", "measure.every_prompts=3", f"prompts={prompts}", "measure.engine=transformers")
    run = fit(material, tmp_path / "out", *asked)
    lines = {line["engine/step"]: line for line in engine_lines(run)}
    assert 2 in lines and 4 in lines and not leftovers(tmp_path)
    for line in lines.values():
        assert line["engine/tau"] == pytest.approx(line["engine/own_tau"], rel=0.02)
