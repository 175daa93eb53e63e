"""`train.init`: training that starts from another checkpoint's weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import tiny_model
from tests.integration.test_fit_errors import arguments, trained
from tests.integration.test_training import last_weights, once

Command = Callable[..., int]
STILL = ("train.lr=1e-30", "train.steps=1")
OWN = ("recipe=eagle3", "drafter.draft_vocab=20")


@pytest.fixture
def checkpoint(material: Path) -> Path:
    return last_weights(once(material, "recipe=medusa", "train.steps=2")).parent


@pytest.mark.sampled(more=[OWN])
@pytest.mark.parametrize("more", [("recipe=medusa",), OWN], ids=["medusa", "own vocabulary"])
def test_train_init_keeps_weights_and_vocabulary_for_other_target_and_is_recorded(
    more: tuple[str, ...], command: Command, material: Path, tmp_path: Path
) -> None:
    """The vocabulary chosen from the first data is kept, though the second has other frequencies and the target is another."""
    first = load_file(trained(command, material, *more) / "drafter.safetensors")
    (checkpoint,) = Path("outputs").glob("*/*/checkpoints/*")
    (tmp_path / "z.jsonl").write_text(6 * (json.dumps({"text": "zyxwv" * 10}) + "\n"))
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    for file in (material / "target").glob("*token*.json"):
        (tuned / file.name).write_text(file.read_text())
    tiny_model(seed=5).save_pretrained(tuned)
    data = (f"train.init={checkpoint}", f"data.path={tmp_path / 'z.jsonl'}", f"target.path={tuned}", *STILL)
    again = trained(command, material, *more, *data, "name=second")
    second, run = load_file(again / "drafter.safetensors"), again.parents[1]
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name
    assert str(checkpoint) in (run / "config.yaml").read_text() and json.loads((run / "run.json").read_text())["finished"]


def test_train_init_from_unfit_checkpoint_is_refused_in_one_line(
    checkpoint: Path, command: Command, material: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for more, words in (
        (("recipe=eagle3",), "is of the family medusa, but this drafter is of eagle3"),
        (("drafter.heads=2",), "give the options it was trained with"),
        (("recipe=prompt_lookup",), "prompt_lookup trains nothing"),
    ):
        with subtests.test(more=more):
            assert command(*arguments(material, *more, f"train.init={checkpoint}")) == 2
            lines = capsys.readouterr().err.strip().splitlines()
            assert len(lines) == 1 and words in lines[0], lines
            assert not Path("outputs").exists()
