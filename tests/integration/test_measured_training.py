"""`measure.every`: a look at the drafter while it trains changes nothing of the training, and chooses the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from drafttrain.core.files import atomic_write_json
from drafttrain.train.checkpoint_manager import PROGRESS, Progress, best_checkpoint
from tests.integration.test_training import digest, fit, losses, once

STEPS = ("recipe=medusa", "train.steps=6", "train.checkpoint_every=4", "decode.max_new_tokens=12")


TOGETHER = ("launcher.nproc=2", "deepspeed=zero3")


@pytest.mark.slow
@pytest.mark.sampled(more=[TOGETHER])
@pytest.mark.parametrize("more", [(), TOGETHER])
def test_measure_every_keeps_losses_and_weights_unchanged(material: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"word {i}"]}) + "\n" for i in range(3)))
    asked = ("measure.every=3", "measure.every_prompts=2", f"prompts={prompts}")
    plain, measured = once(material, *STEPS, *more), fit(material, tmp_path, *STEPS, *more, *asked)
    assert losses(measured) == losses(plain) and digest(measured) == digest(plain)
    lines = [json.loads(line) for line in (measured / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "measured_tau" in line] == [3, 4, 6], "every 3 steps, and at each checkpoint"
    assert all(line["measured_tau"] >= 1 and line["measured_speedup"] > 0 for line in lines if "measured_tau" in line)
    for checkpoint in (measured / "checkpoints").iterdir():
        step = int(checkpoint.name.split("-")[1])
        assert Progress.of(checkpoint).measured_tau == next(x["measured_tau"] for x in lines if x["step"] == step)


def test_best_checkpoint_uses_measured_tau_only_if_all_have_it(tmp_path: Path) -> None:
    def keep(step: int, **figures: float) -> None:
        (tmp_path / f"step-{step:05}").mkdir(exist_ok=True)
        atomic_write_json(tmp_path / f"step-{step:05}" / PROGRESS, {"step": step} | figures)

    keep(1, expected_tau=2.0, measured_tau=2.2)
    keep(2, expected_tau=2.1, measured_tau=1.9)
    assert best_checkpoint(tmp_path).name == "step-00001"
    keep(3, expected_tau=2.05)
    assert best_checkpoint(tmp_path).name == "step-00002", "not all were measured: expected on the same text"


def test_measure_every_invalid_options_are_refused_before_training(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for asked, line in (
        (("recipe=medusa2", "measure.every=2"), "this family adapts it"),
        (("measure.every=-1",), "measure.every is -1"),
        (("measure.every=2", "prompts=none.jsonl"), "none.jsonl"),
    ):
        with subtests.test(asked=asked):
            assert command("fit", "logger=none", "measure.enabled=false", "train.steps=1", "train.global_batch=2", *asked) == 2
            error = capsys.readouterr().err
            assert line in error and len(error.strip().splitlines()) == 1
