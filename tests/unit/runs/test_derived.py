"""What a recipe's settings become for a device, a target and data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from drafttrain.drafters.options import Eagle3Options
from drafttrain.model.shapes import TargetShape
from drafttrain.runs.derived import derived, doubts, from_device, lines_of, recorded, with_values
from drafttrain.runs.options import RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.train import TrainOptions
from tests.helpers import tiny_target


def asked(**train: Any) -> RunOptions:
    """As the recipe of EAGLE-3 asks."""
    usual = {"steps": 60000, "epochs": 10, "least_steps": 2000, "global_batch": 16, "lr": 5e-5, "lr_width": 2048}
    return RunOptions(drafter=Eagle3Options(draft_vocab=32000), train=TrainOptions(**usual | train))


def shape(width: int, tokens: int = 128256) -> TargetShape:
    return replace(tiny_target().shape, hidden_size=width, vocab_size=tokens)


@pytest.mark.parametrize(
    ("conversations", "processes", "steps", "batch"),
    [
        (500_000, 8, 60000, 16),  # the published number
        (20_000, 8, 12500, 16),  # ten passes
        (2_000, 1, 2500, 8),  # ten passes were 1,250 steps of 16
        (100, 1, 250, 4),  # no batch is smaller
        (100, 8, 125, 8),  # than there are processes
    ],
)
def test_derived_steps_and_batch_follow_number_of_conversations(
    conversations: int, processes: int, steps: int, batch: int
) -> None:
    train = with_values(asked(), derived(asked(), shape(4096), conversations, processes)).train
    assert (train.steps, train.global_batch) == (steps, batch)
    assert train.lr == pytest.approx(5e-5 * math.sqrt(batch / 16))


def test_derived_batch_and_rate_of_shorter_trial_are_those_of_the_whole_run() -> None:
    whole, trial = (derived(options, shape(4096), 2_000, 1) for options in (asked(), asked(steps=500, exact_steps=True)))
    assert (trial["train.steps"], trial["train.global_batch"], trial["train.lr"]) == (500, 8, whole["train.lr"])
    settled = with_values(asked(steps=500, exact_steps=True), trial)
    assert lines_of(asked(steps=500), settled, shape(4096), 2_000)[0].startswith("train.global_batch: 8 for 2,000")
    longer = derived(asked(steps=9000, exact_steps=True), shape(4096), 2_000, 1)
    assert (longer["train.steps"], longer["train.global_batch"]) == (9000, 8), "more passes than the recipe's"


@pytest.mark.parametrize(("width", "factor"), [(8192, 1), (2048, 1), (512, 4), (128, 16), (64, 16)])
def test_derived_rate_grows_for_narrow_targets(width: int, factor: float) -> None:
    assert derived(asked(), shape(width), 500_000, 1)["train.lr"] == pytest.approx(5e-5 * factor)
    assert "train.lr" not in derived(asked(lr_width=None), shape(width), 500_000, 1)


def test_derived_draft_vocabulary_of_few_tokens_is_left_out() -> None:
    assert derived(asked(), shape(64, 32000), 500_000, 1)["drafter.draft_vocab"] is None
    assert "drafter.draft_vocab" not in derived(asked(), shape(64, 32001), 500_000, 1)


def test_derived_configuration_is_settled_and_its_changes_are_told() -> None:
    """A resumed run reads the same configuration again: nothing of it changes any more."""
    values = derived(asked(), shape(64, 512), 2_000, 1)
    after = with_values(asked(), values)
    assert with_values(after, derived(after, shape(64, 512), 9_999, 4)) == after
    resolved: dict[str, Any] = {"train": {"lr": 1.0, "clip": 0.5}, "drafter": {}, "name": "x"}
    written = recorded(resolved, values)
    assert written["train"]["lr"] == after.train.lr and written["train"]["clip"] == 0.5 and resolved["train"]["lr"] == 1.0
    assert [line.split(": ")[0] for line in lines_of(asked(), after, shape(64, 512), 2_000)] == [
        "train.steps",
        "train.lr",
        "drafter.draft_vocab",
    ]
    plain = RunOptions(drafter=Eagle3Options())
    same = with_values(plain, derived(plain, shape(64), 2_000, 1))
    assert same == plain and not lines_of(plain, same, shape(64), 2_000)


def test_doubts_name_settings_that_can_hardly_be_meant(subtests: pytest.Subtests) -> None:
    for train, words in (
        ({"lr": 0.0}, "train.lr is 0: the drafter learns nothing"),
        ({"lr": 0.5}, "train.lr is 0.5, several times the highest rate of any recipe with adamw"),
        ({"lr": 0.5, "optimizer": "muon"}, "train.lr is 0.5, several times the highest rate of any recipe with muon"),
        ({"steps": 6}, "6 steps of 16 see 96 of 10,000 rows of the data"),
    ):
        with subtests.test(train=train):
            assert doubts(asked(**train).train, 10_000) == [words]
    assert not doubts(asked(lr=0.03, steps=7).train, 10_000)


def test_derived_formats_are_those_of_the_device() -> None:
    on_cpu = RunOptions(target=TargetOptions(dtype="auto", device="cpu"), train=TrainOptions(precision="auto"))
    assert from_device(on_cpu) == {"target.dtype": "float32", "train.precision": "float32"}
    assert from_device(RunOptions(target=TargetOptions(dtype="float16"))) == {}
