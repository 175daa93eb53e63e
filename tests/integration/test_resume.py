"""Runs that are killed, damaged, moved to other machines or out of disk go on, and end where they would have ended."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.core.errors import Interrupted
from drafttrain.train import shards
from drafttrain.train.checkpoint_manager import SUMS
from drafttrain.train.logger import Logger
from tests import forked
from tests.integration.test_training import arguments, digest, fit, kill_after, last_weights, lines_of, losses, once

STEPS = ("recipe=medusa", "train.steps=12", "train.checkpoint_every=4")


def interrupt_by_force(material: Path, output: Path, *more: str) -> Path:
    """A run of 12 steps with the checkpoints of steps 4 and 8, as if it had been killed thereafter: that of step 12, which is
    then removed, has pushed none out.
    """
    run = fit(material, output, *STEPS, "train.keep_last=3", *more)
    shutil.rmtree(run / "checkpoints" / "step-00012")
    state = run / "run.json"
    state.write_text(state.read_text().replace('"finished": true', '"finished": false'))
    return run


@pytest.mark.slow
@pytest.mark.sampled(name=["optimizer-00000.safetensors"])  # unit/train/test_sealed.py has every file
@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer-00000.safetensors", "trainer.json", SUMS])
def test_resume_from_damaged_checkpoint_falls_back_to_previous_one(name: str, material: Path, tmp_path: Path) -> None:
    run = interrupt_by_force(material, tmp_path)
    whole_losses, file = losses(run), run / "checkpoints" / "step-00008" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    said = forked.run(arguments(material, tmp_path, *STEPS, "resume=auto"))
    assert f"checkpoint step-00008 is damaged and renamed to step-00008.damaged: {name} is " in said
    assert "(resumed at step 4)" in said
    assert losses(run) == whole_losses


@pytest.mark.slow
def test_resume_of_finished_run_with_more_steps_equals_long_run(material: Path, tmp_path: Path) -> None:
    settings = ("recipe=medusa", "train.schedule=constant", "train.lr=2e-3")
    run = fit(material, tmp_path / "short", *settings, "train.steps=8", "train.warmup=0.5")
    assert fit(material, tmp_path / "short", *settings, "train.steps=16", "train.warmup=0.5", f"resume={run}") == run
    whole = fit(material, tmp_path / "long", *settings, "train.steps=16", "train.warmup=0.25")
    assert losses(run) == losses(whole) and len(losses(run)) == 16 and digest(run) == digest(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("deepspeed=zero1",), ("deepspeed=zero3", "launcher.nproc=2")),
        (("deepspeed=zero3", "launcher.nproc=2"), ("deepspeed=zero0", "train.micro_batch=4")),
    ],
)
def test_resume_with_other_processes_and_zero_stage_keeps_losses(
    before: tuple[str, ...], after: tuple[str, ...], material: Path, tmp_path: Path
) -> None:
    whole = once(material, *STEPS)
    interrupt_by_force(material, tmp_path / "moved", *before)
    run = fit(material, tmp_path / "moved", *STEPS, *after, "resume=auto")
    assert len(list((tmp_path / "moved").glob("*/*/run.json"))) == 1, "resume=auto began a new run"
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    a, b = load_file(last_weights(whole)), load_file(last_weights(run))
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, atol=1e-5, rtol=1e-4)


def test_fit_disk_full_skips_checkpoint_and_run_can_resume(
    material: Path,
    tmp_path: Path,
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, full = shards.write, iter([False, True, True, False, False])

    def on_a_small_disk(shares: Any, state: Any, file: Path) -> None:
        write(shares, state, file)
        if next(full):
            file.write_bytes(b"half")
            Path("/dev/full").write_bytes(b"the error is the system's own")

    monkeypatch.setattr(shards, "write", on_a_small_disk)
    fitting = (*arguments(material, tmp_path, *STEPS, "resume=auto")[3:],)
    assert command(*fitting) == 2
    said = capsys.readouterr()
    assert "disk full: no checkpoint of step 8; the earlier ones are kept; free space under" in said.out
    assert said.err.startswith("drafttrain: disk full while saving the last checkpoint")
    (run,) = (path.parent for path in tmp_path.glob("*/*/run.json"))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00004"], "half of one was left"
    assert len(losses(run)) == 12
    assert command(*fitting) == 0 and "(resumed at step 4)" in capsys.readouterr().out


def test_fit_signalled_run_saves_step_and_resumes_to_same_weights(
    material: Path,
    tmp_path: Path,
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fitted(output: Path) -> int:
        return command(*arguments(material, output, *STEPS, "resume=auto")[3:])

    assert fitted(tmp_path / "whole") == 0
    log = Logger.step

    def log_and_hear(self: Logger, step: int, values: Any) -> None:
        log(self, step, values)
        if step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)

    with monkeypatch.context() as patched:
        patched.setattr(Logger, "step", log_and_hear)
        assert fitted(tmp_path / "broken") == Interrupted.CODE
    assert (
        capsys.readouterr().err == "drafttrain: interrupted after step 6 of 12, which is saved; resume=auto continues the run\n"
    )
    (whole,), (broken,) = ([path.parent for path in (tmp_path / name).glob("*/*/run.json")] for name in ("whole", "broken"))
    assert sorted(path.name for path in (broken / "checkpoints").iterdir()) == ["step-00004", "step-00006"]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert fitted(tmp_path / "broken") == 0
    assert digest(broken) == digest(whole) and losses(broken) == losses(whole)
    kept = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (whole, broken)]
    assert kept[0] == kept[1], "what was saved in passing has gone"


def test_fit_logs_step_time_shares_memory_and_profile_trace(
    material: Path, tmp_path: Path, command: Callable[..., int]
) -> None:
    asked = ("train.per_rank=true", "train.log_every=6", "train.profile=[2,3]")
    assert command(*arguments(material, tmp_path, *STEPS)[3:], *asked) == 0
    (run,) = (path.parent for path in tmp_path.glob("*/*/run.json"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["target_share"] + line["data_share"] + line["rest_share"] == pytest.approx(1.0)
        assert line["mfu"] is None and line["peak_memory"] > 2**26 and line["tokens_per_s"] > 0
    assert [line["step"] for line in lines if "target_share_by_rank" in line] == [6, 12]
    assert lines[5]["target_share_by_rank"] == [lines[5]["target_share"]]
    assert ((run / "trace-rank0.json.gz").stat().st_size and not (run / "logs").exists()) or not list((run / "logs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.grid)])
def test_fit_killed_at_random_steps_equals_uninterrupted_run(kills: int, material: Path, tmp_path: Path) -> None:
    """At moments drawn at random: while steps run, while a checkpoint is written, while an old one is removed."""
    steps = ("recipe=medusa", f"train.steps={kills * 30}", "train.checkpoint_every=4", "resume=auto")
    generator = random.Random(0)
    for _ in range(kills):  # a run begins again after its last checkpoint, so that no kill comes after the last step
        kill_after(arguments(material, tmp_path, *steps), tmp_path, lines_of(tmp_path) + generator.randint(1, 15))
    run, whole = fit(material, tmp_path, *steps), once(material, *steps)
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
