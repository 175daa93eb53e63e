"""Values that are not finite in a target's states, in losses and in gradients: they cost a row or a step, and not the run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.core.files import atomic_directory
from tests.integration.test_fit_errors import arguments
from tests.integration.test_training import fit, losses
from tests.standin.served import states_server

Command = Callable[..., int]
LETTER = "q"
STEPS = ("train.steps=12", "train.global_batch=4", "train.micro_batch=2", "data.held_out=4")


@pytest.fixture(scope="module")
def damaged(material: Path) -> Path:
    """The material, with a target whose embedding of one letter is NaN. Three of its texts have that letter."""
    folder = material / "damaged"
    with atomic_directory(folder) as aside:
        (aside / "target").mkdir()
        for file in (material / "target").iterdir():
            (aside / "target" / file.name).write_bytes(file.read_bytes())
        weights = load_file(aside / "target" / "model.safetensors")
        weights["model.embed_tokens.weight"][token_of(material)] = torch.nan
        save_file(weights, aside / "target" / "model.safetensors", {"format": "pt"})
        texts = [json.loads(line)["text"].replace(LETTER, "r") for line in (material / "data.jsonl").read_text().splitlines()]
        for number in (3, 17, 30):
            texts[number] = texts[number][:6] + LETTER + texts[number][7:]
        (aside / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def token_of(material: Path) -> int:
    from transformers import AutoTokenizer

    (token,) = AutoTokenizer.from_pretrained(material / "target")(LETTER, add_special_tokens=False)["input_ids"]
    return int(token)


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Of the run's metrics, which must be JSON: NaN is none."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_of(output: str = "outputs") -> Path:
    return sorted(Path(output).glob("*/*/run.json"))[-1].parent


@pytest.mark.parametrize("more", [(), ("features=cached", "features.format=float8")], ids=["online", "cached"])
def test_fit_rows_without_finite_states_are_left_out_and_named_once(
    more: tuple[str, ...], command: Command, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 40 texts, 36 are trained on: two epochs are 18 steps."""
    assert command(*arguments(damaged, *STEPS, "train.steps=18", "train.checkpoint_every=9", *more)) == 0
    said, run = capsys.readouterr().out, run_of()
    named = re.findall(r"data\.jsonl:(\d+): left out, because the target's states are not finite", said.replace("\n", ""))
    assert sorted(map(int, named)) in ([4, 18, 31], [4, 18], [4, 31], [18, 31]), "a held-out one is not trained on"
    assert sorted(line.split(":")[1] for line in (run / "left_out.txt").read_text().splitlines()) == sorted(named)
    lines = lines_of(run)
    assert len(lines) == 18 and all(line["loss"] is not None and line["grad_norm"] is not None for line in lines)
    left_out = sum(line.get("left_out", 0) for line in lines)
    assert left_out >= 2 * len(named), "in every epoch"
    progress = json.loads((run / "checkpoints" / "step-00018" / "trainer.json").read_text())
    assert f'"left_out": {left_out}' in json.dumps(progress) and progress["expected_tau"] >= 1.0
    assert all(bool(x.isfinite().all()) for x in load_file(run / "checkpoints" / "step-00018" / "drafter.safetensors").values())


def test_fit_packed_row_without_finite_states_names_its_records(
    command: Command, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments(damaged, *STEPS, "data.pack=true", "data.max_length=80")) == 0
    named = re.findall(r"one of (.*?): left out, because", capsys.readouterr().out.replace("\n", " "))
    numbers = [set(re.findall(r"jsonl:(\d+)", row)) for row in named]
    assert numbers and all(found & {"4", "18", "31"} for found in numbers)
    assert all(line["loss"] is not None for line in lines_of(run_of()))


@pytest.mark.slow
def test_fit_on_states_of_server_leaves_out_same_rows(damaged: Path, tmp_path: Path) -> None:
    """A server gives states that are not finite for three of 40 texts, every time that they are asked for."""
    with states_server(damaged, tmp_path / "states") as states:
        served = fit(damaged, tmp_path / "served", *states.asked("train.steps=18", "data.max_length=64"))
        assert not states.left()
    online = fit(damaged, tmp_path / "online", *STEPS, "recipe=medusa", "train.steps=18", "data.max_length=64")
    assert [line.get("left_out") for line in lines_of(served)] == [line.get("left_out") for line in lines_of(online)]
    assert (served / "left_out.txt").read_text() == (online / "left_out.txt").read_text()
    assert losses(served) == pytest.approx(losses(online), rel=1e-5)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
def test_fit_two_processes_leave_out_rows_as_one_does(stage: str, damaged: Path, tmp_path: Path) -> None:
    common = ("recipe=medusa", "train.optimizer=adamw", "train.lr=1e-3", "train.micro_batch=1", "train.steps=18")
    one = fit(damaged, tmp_path / "one", *common)
    two = fit(damaged, tmp_path / "two", *common, f"deepspeed={stage}", "launcher.nproc=2", "decode.tree_nodes=8")
    assert [line.get("left_out") for line in lines_of(two)] == [line.get("left_out") for line in lines_of(one)]
    assert sum(line.get("left_out", 0) for line in lines_of(two)) >= 4
    assert losses(two) == pytest.approx(losses(one), rel=2e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_fit_bad_steps_in_a_row_end_the_run_with_its_last_good_checkpoint(
    precision: str, command: Command, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first step's rate takes all weights so far that the second one's loss overflows."""
    given = ("train.optimizer=adamw", "train.schedule=constant", "train.warmup=0", "train.lr=1e36", "train.bad_steps=3")
    assert command(*arguments(material, *STEPS, *given, f"train.precision={precision}")) == 2
    said = capsys.readouterr()
    (line,) = said.err.strip().splitlines()
    assert re.search(r"steps 2 to [56] changed nothing, because no gradient was finite; .*checkpoints has the weights", line)
    (checkpoint,) = (run_of() / "checkpoints").glob("step-*[!0]")
    assert all(bool(x.isfinite().all()) for x in load_file(checkpoint / "drafter.safetensors").values())
    assert [line["loss"] is None for line in lines_of(run_of())][:3] == [False, True, True]
    assert "left out" not in said.out, "no row is at fault"
