"""The race of `drafttrain auto`: who goes, what a repeated command goes on with, what a failure costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from drafttrain.core.errors import Interrupted, UserError
from drafttrain.core.files import write_sealed_json
from drafttrain.drafters.checkpoint import checkpoint_name
from drafttrain.measure.tuning import predicted_speedup
from drafttrain.runs.options import RunOptions
from drafttrain.runs.race import Candidate, CandidateRace, TimeBudget, rungs_of
from drafttrain.train import TrainOptions
from drafttrain.train.checkpoint_manager import PROGRESS, Progress
from drafttrain.train.interrupt import Interrupt


def found(*speedups: float, spread: float = 0.0) -> dict[str, Any]:
    """A run's tune.json with these predictions, one for each batch size. spread: half of the interval, as a share."""
    interval = [2.0 * (1 - spread), 2.0 * (1 + spread)]
    trained = {"name": "as trained", "expected_tau": 1.2, "cost": 4.0, "interval": None}
    return {
        "batch_sizes": [
            {
                "finalists": [trained, {"name": "tree", "expected_tau": 2.0, "cost": 2.0 / speedup, "interval": interval}],
                "chosen": {"name": "tree", "better": True},
            }
            for speedup in speedups
        ]
    }


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [((1.5,), 1.5), ((2.0, 0.5), 2.0**0.5), ((0.8, 0.5), 0.4**0.5)],
    ids=["one size", "switched off at one", "gains at none"],
)
def test_predicted_speedup_counts_a_batch_size_without_gain_as_switched_off(speedups: Sequence[float], expected: float) -> None:
    value, low, high = predicted_speedup(found(*speedups, spread=0.1))
    assert value == pytest.approx(expected) and low < value < high


def test_predicted_speedup_is_of_the_trained_proposal_where_no_other_was_better() -> None:
    figures = found(2.0)
    figures["batch_sizes"][0]["chosen"]["better"] = False
    assert predicted_speedup(figures) == pytest.approx((0.3, 0.3, 0.3))


def test_predicted_speedup_of_drafter_without_prediction_is_that_of_its_race() -> None:
    size = {"finalists": [{"expected_tau": None}], "chosen": {"better": False, "speedups": [1.0, 1.44]}}
    value, low, high = predicted_speedup({"batch_sizes": [size]})
    assert value == pytest.approx(1.2) and low == 1.0 and high > 1.44


def test_predicted_speedup_from_one_timed_batch_has_a_wide_interval() -> None:
    size = {"finalists": [{"expected_tau": None}], "chosen": {"better": False, "speedups": [1.5]}}
    assert predicted_speedup({"batch_sizes": [size]}) == pytest.approx((1.5, 1.0, 3.0)), "below 1 it is switched off"


def test_budget_allows_more_candidates_the_longer_it_is() -> None:
    counts = [TimeBudget(60.0 * minutes).most_candidates(30.0) for minutes in (1, 5, 15, 60)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] > 8
    for count in counts[1:]:
        assert TimeBudget(3600.0).race / rungs_of(count) / count >= 30.0


def test_budget_allows_more_candidates_the_more_train_at_once() -> None:
    counts = [TimeBudget(3600.0).most_candidates(120.0, parallel) for parallel in (1, 4)]
    assert counts == [4, 12], "24 minutes: two rounds of four, four rounds of three times four"


class Fake:
    """Commands that write what a `fit` leaves, with speedups by candidate and round."""

    def __init__(self, speedups: dict[str, Sequence[float]], spread: float = 0.2) -> None:
        self.speedups, self.spread, self.lines, self.stops_at = speedups, spread, list[list[str]](), -1

    def __call__(self, race: CandidateRace, label: str, line: Sequence[str], place: int = -1) -> str | None:
        if len(self.lines) == self.stops_at:
            raise Interrupted("by SIGTERM")
        self.lines.append(list(line))
        given = dict(word.split("=", 1) for word in line if "=" in word)
        name, steps = given["name"], int(given["train.steps"])
        if label.endswith("round 1") and not self.speedups[name]:
            return "the learning rate is too high"
        run = race.folder / "runs" / name / "now"
        if label.endswith("round 1") and self.speedups[name] == (0.0,):
            race.folder.joinpath("logs", f"{name}-round-1.log").write_text(
                "run\nnote: tuning was left out: no draft was right\nnext:"
            )
            label = "nothing found"
        checkpoint = run / "checkpoints" / checkpoint_name(steps)
        checkpoint.mkdir(parents=True)
        (run / "run.json").write_text("{}")
        write_sealed_json(checkpoint / PROGRESS, asdict(Progress(steps, seconds=0.1 * steps)))
        if "round" in label:
            number = int(label.split()[-1]) - 1
            (run / "tune.json").write_text(json.dumps(found(self.speedups[name][number], spread=self.spread)))
        return None


Runner = Callable[..., CandidateRace]


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    def run(fake: Fake, steps: int = 10_000, share: tuple[int, int] | None = None) -> CandidateRace:
        monkeypatch.setattr(CandidateRace, "command", lambda *arguments: fake(*arguments))
        options = replace(RunOptions(), train=TrainOptions(steps=steps))
        candidates = [Candidate(name, name, (), options, [], 1) for name in fake.speedups]
        study = CandidateRace.study_of(tmp_path, list(fake.speedups))
        words, interrupt = ["data.seed=1"], Interrupt()
        return CandidateRace(
            tmp_path, study, candidates, TimeBudget(3600.0), [1], 1, words, lambda line: None, interrupt, share=share
        )

    return run


def test_race_of_four_halves_twice_and_finds_the_best(runner: Runner) -> None:
    fake = Fake({"a": (1.1, 1.0), "b": (1.4, 1.5), "c": (1.5, 1.4), "d": (1.2, 1.0)})
    race = runner(fake)
    assert race.winner().user_attrs["name"] == "b"
    trained = [next(word for word in line if word.startswith("name=")) for line in fake.lines]
    assert trained == [f"name={name}" for name in "abcdabcdbc"], "tried, and then two rounds"
    states = {trial.user_attrs["name"]: trial.state.name for trial in race.study.trials}
    assert states == {"a": "PRUNED", "b": "RUNNING", "c": "PRUNED", "d": "PRUNED"}
    steps = [int(dict(word.split("=") for word in line if "=" in word)["train.steps"]) for line in fake.lines]
    assert steps[0] < steps[4] < steps[8] and all("data.seed=1" in line for line in fake.lines)


def test_candidate_goes_at_once_where_its_interval_is_below_the_best_ones(runner: Runner) -> None:
    fake = Fake({"a": (1.0, 1.0), "b": (1.2, 1.3), "c": (1.9, 1.9), "d": (1.3, 1.2)}, spread=0.01)
    assert runner(fake).winner().user_attrs["name"] == "c"
    assert len(fake.lines) == 8, "nobody is left to race in the second round"


def test_interrupted_race_goes_on_without_training_anything_twice(runner: Runner) -> None:
    speedups = {"a": (1.1, 1.0), "b": (1.4, 1.5), "c": (1.5, 1.4), "d": (1.2, 1.0)}
    first, second = Fake(speedups), Fake(speedups)
    first.stops_at = 6
    with pytest.raises(Interrupted):
        runner(first).winner()
    assert runner(second).winner().user_attrs["name"] == "b"
    parts = [(line[1], next(word for word in line if word.startswith("train.steps="))) for line in first.lines + second.lines]
    assert len(parts) == len(set(parts)) == 10


def test_shares_of_a_race_judge_by_what_others_have_reported_and_leave_one_winner(runner: Runner) -> None:
    speedups = {"a": (1.1,), "b": (1.4, 1.4), "c": (1.5, 1.6), "d": (1.2,)}
    shares = [Fake(speedups), Fake(speedups)]
    for number, fake in enumerate(shares, start=1):
        runner(fake, share=(number, 2)).run()
    trained = [[next(word for word in line if word.startswith("name=")) for line in fake.lines] for fake in shares]
    assert trained[0] == [f"name={name}" for name in "acacc"] and trained[1] == [f"name={name}" for name in "bdbdb"]
    last = Fake(speedups)
    race = runner(last)
    assert race.winner().user_attrs["name"] == "c" and not last.lines, "nothing is left to train"
    assert [trial.state.name for trial in race.study.trials] == ["PRUNED", "PRUNED", "RUNNING", "PRUNED"]


def test_share_of_a_race_that_ended_early_is_run_with_the_rest(runner: Runner) -> None:
    speedups = {"a": (1.1,), "b": (1.4,)}
    runner(Fake(speedups), share=(1, 2)).run()
    last = Fake(speedups)
    assert runner(last).winner().user_attrs["name"] == "b"
    assert ["name=b" in line for line in last.lines] == [True, True]


def test_time_of_shares_that_run_together_counts_once(runner: Runner) -> None:
    study = runner(Fake({"a": (1.1,), "b": (1.4,)})).study
    for key, seconds in (("spent", 50.0), ("spent 1", 100.0), ("spent 2", 300.0)):
        study.set_user_attr(key, seconds)
    spent = [runner(Fake({"a": (1.1,), "b": (1.4,)}), share=share).spent_before for share in ((1, 2), (2, 2), None)]
    assert spent == [150.0, 350.0, 350.0]


def test_candidate_that_fails_is_left_out_with_its_reason(runner: Runner) -> None:
    fake = Fake({"a": (), "b": (1.2,)})
    race = runner(fake)
    assert race.winner().user_attrs["name"] == "b"
    assert race.study.trials[0].user_attrs["failed"] == "the learning rate is too high"


def test_candidate_whose_drafts_are_never_right_is_left_out(runner: Runner) -> None:
    race = runner(Fake({"a": (0.0,), "b": (1.2,)}))
    assert race.winner().user_attrs["name"] == "b"
    assert race.study.trials[0].user_attrs["failed"] == "no draft was right"


def test_race_in_which_every_candidate_fails_names_the_reasons(runner: Runner) -> None:
    with pytest.raises(UserError, match="every candidate has failed: a: the learning rate is too high; b: the learning"):
        runner(Fake({"a": (), "b": ()})).winner()


def test_candidate_trains_no_longer_than_its_recipe(runner: Runner) -> None:
    fake = Fake({"a": (1.1,), "b": (1.4,)})
    runner(fake, steps=30).winner()
    assert max(int(dict(word.split("=") for word in line if "=" in word)["train.steps"]) for line in fake.lines) == 30
