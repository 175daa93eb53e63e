"""`fit` chooses the fastest proposal before it measures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from drafttrain.commands import fit as fit_file
from drafttrain.commands import tune
from drafttrain.drafters.options import CascadeOptions, Eagle3Options
from drafttrain.drafters.tuned_settings import tuned_settings
from drafttrain.measure.cases import Case
from drafttrain.measure.tuning import DEFAULT, PLAIN, Raced, Tuner
from drafttrain.runs.options import RunOptions

Command = Callable[..., int]


@pytest.mark.parametrize("gained", [1.5, 0.9])
def test_fit_stores_and_reports_proposal_that_is_fastest_on_held_out_prompts(
    gained: float,
    command: Command,
    material: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    races, best = list[dict[str, Any]](), list[str]()

    def race(self: Tuner, name: str, settings: dict[str, Any], cases: Sequence[Case], seconds: float) -> Raced:
        """Another finalist wins each first race, and then again. Which there are depends on the machine's timings."""
        races.append({"settings": settings, "questions": [case.question_id for case in cases], "size": self.batch_size})
        if len(races) % 2:
            best.append(next(key for key in settings if key not in (DEFAULT, PLAIN, *best)))
        plain = 1.0 if self.batch_size == 1 else 1.7
        return {key: [plain if key == PLAIN else gained if key in (best[-1], "chosen") else 1.0] for key in settings}, {}

    monkeypatch.setattr(Tuner, "race", race)
    data = ("target=hf", f"target.path={material / 'target'}", f"data.path={material / 'data.jsonl'}", "data.held_out=4")
    small = ("train.steps=2", "train.checkpoint_every=1", "train.keep_last=2", "train.global_batch=4", "logger=none")
    measured = (
        "measure.limit=3",
        "measure.batch_sizes=[1,4,8]",
        "measure.minutes=0.05",
        "measure.transformers=false",
        "decode.max_new_tokens=12",
    )
    assert command("fit", "recipe=medusa", *data, *small, *measured) == 0
    assert [race["size"] for race in races] == [1, 1, 4, 4], "one proposal each, of the sizes that 4 prompts fill"
    assert all(race["questions"] == [f"held-out {number}" for number in (1, 2, 3, 4)] for race in races)
    (run,) = Path("outputs/medusa").iterdir()
    report, said = json.loads((run / "report.json").read_text()), capsys.readouterr().out
    rows = {entry["name"]: entry["tuned"] for entry in report["checkpoints"]}
    kept = [tuned_settings(path) for path in sorted((run / "checkpoints").iterdir())]
    notes = report["measure"]["notes"]
    assert "draft at up to batch size 1: in tuning, plain decoding was faster above" in " ".join(notes)
    assert "batch size 8 was not tuned: drafts are those chosen for batch size 4" in notes
    if gained < 1:
        assert rows == {"step-00001": True, "step-00002": True}
        assert kept == [{1: {"speedup": 1.0}, 4: {"speedup": 0.588235}}] * 2
        assert "tuning, batch 4: nothing is faster than the trained proposal, on 4 held-out conversations" in said
        return
    (plain,) = rows.keys() - {"step-00001", "step-00002"}
    assert plain in ("step-00001 as trained", "step-00002 as trained") and not rows[plain] and rows[plain.split()[0]]
    first, second = (race["settings"][name] for race, name in zip(races[::2], best, strict=True))
    assert kept == [{1: first | {"speedup": 1.5}, 4: second | {"speedup": 0.882353}}] * 2 and first != second
    assert report["best"] in ("step-00001", "step-00002")
    entry = next(entry for entry in report["checkpoints"] if entry["name"] == report["best"])
    proposals = {s["value"]: s["proposal"] for s in entry["slices"] if s["by"] == "batch_size"}
    assert proposals[1] == entry["proposal"] != proposals[4] == proposals[8], "each size with its own"
    assert f"| batch size 4: {proposals[4]} |" in (run / "report.md").read_text()
    assert "1.50x as fast as the trained proposal, on 4 held-out conversations" in said
    assert "drafttrain export checkpoint=outputs/medusa/" in said, "a next step, since stacks load the family"


def test_fit_predicts_speedup_by_costs_of_laps_that_have_chosen_nothing(
    command: Command, material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that one race timed too low is chosen for that, and its true cost is what counts."""
    races = list[dict[str, Any]]()

    def race(self: Tuner, name: str, settings: dict[str, Any], cases: Sequence[Case], seconds: float) -> Raced:
        races.append(settings)
        costs = dict.fromkeys(settings, 4.0) | ({list(settings)[1]: 0.1} if len(races) == 1 else {})
        return {key: [1.0] for key in settings}, costs

    monkeypatch.setattr(Tuner, "race", race)
    data = ("target=hf", f"target.path={material / 'target'}", f"data.path={material / 'data.jsonl'}", "data.held_out=4")
    small = ("train.steps=2", "train.checkpoint_every=2", "train.global_batch=4", "logger=none", "decode.max_new_tokens=12")
    assert command("fit", "recipe=medusa", *data, *small, "measure.batch_sizes=[1]", "measure.tune_only=true") == 0
    (run,) = Path("outputs/medusa").iterdir()
    (found,) = json.loads((run / "tune.json").read_text())["batch_sizes"]
    rows = {row["name"]: row for row in found["finalists"]}
    chosen, trained = rows[found["chosen"]["name"]], rows[DEFAULT]
    assert chosen["name"] == list(races[0])[1] and chosen["cost"] == trained["cost"] == 4.0
    assert found["chosen"]["over_default"] == pytest.approx(chosen["expected_tau"] / trained["expected_tau"], abs=1e-5)
    logged = [json.loads(line).get("predicted_speedup") for line in (run / "metrics.jsonl").read_text().splitlines()]
    better = max(chosen["expected_tau"], trained["expected_tau"])
    assert logged[-1] == pytest.approx(better / 4.0, abs=1e-5), "trackers show it"


def test_fit_without_measure_tune_decodes_as_trained(
    command: Command, material: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "search", lambda *_: pytest.fail("nothing is to be tuned"))
    data = ("target=hf", f"target.path={material / 'target'}", f"data.path={material / 'data.jsonl'}", "data.held_out=4")
    small = ("train.steps=1", "train.checkpoint_every=1", "train.global_batch=4", "logger=none", "measure.limit=2")
    measured = ("measure.minutes=0.01", "measure.transformers=false", "decode.max_new_tokens=8")
    assert command("fit", "recipe=medusa", *data, *small, *measured, "measure.tune=off") == 0
    assert "tuning" not in capsys.readouterr().out
    assert command("fit", "recipe=medusa", *data, *small, *measured, "decode.draft_length=2") == 0
    assert "tuning was left out: decode.draft_length is set" in " ".join(capsys.readouterr().out.split())
    assert command("fit", "recipe=medusa", *data, *small, *measured, "data.held_out=1", "measure.batch_sizes=[2]") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tuning was left out: held-out conversations that fit: 1, fewer than a batch of 2; raise data.held_out" in said


def test_next_steps_of_run_with_measure_off_measure_and_export_it(capsys: pytest.CaptureFixture[str]) -> None:
    fit_file.next_steps(Path("outputs/x y"), RunOptions(drafter=CascadeOptions()))
    said = capsys.readouterr().out
    assert "drafttrain tune 'checkpoint=outputs/x y'\n" in said and "export" not in said, "no stack loads the family"
    fit_file.next_steps(Path("outputs/x"), RunOptions(drafter=Eagle3Options()))
    said = capsys.readouterr().out
    assert "drafttrain export checkpoint=outputs/x format=all out=exported\n" in said
    assert "measure acceptance and speed: 3 minutes\n" in said
    assert "drafttrain verify engine=vllm out=exported/vllm checkpoint=outputs/x\n" in said
