"""The race of `drafttrain auto`: candidates train in rounds, and the worse half goes after each.

Each part is a drafttrain command in a process of its own, so that one that fails costs no other. An Optuna study holds what is
done, so that a race goes on where it was ended: a trial for each candidate, a step for each round.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from drafttrain.core.errors import Interrupted, UserError
from drafttrain.drafters.checkpoint import list_checkpoints
from drafttrain.measure.tuning import predicted_speedup
from drafttrain.runs.options import RunOptions
from drafttrain.train.checkpoint_manager import Progress
from drafttrain.train.interrupt import Interrupt

if TYPE_CHECKING:
    from optuna.study import Study

RACE, ANSWERS, MEASURE = 0.4, 0.25, 0.1  # shares of the budget: the race, answers of the target, the last measurement
MOST_MINUTES = 10.0  # of the last measurement
COMPARED = 1800.0  # seconds of a budget from which families that need no training are measured too
TRIED = 10  # steps that show whether a candidate trains, and how fast
START = 10.0  # seconds of a command besides training, without the time that loading the target takes
PREDICTING = 0.25  # share of a candidate's time in a round that its prediction may take
FIGURES = "tune.json"  # of a run's predictions
ALL = -1  # the place of a command that has all GPUs of the machine


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe, perhaps with settings of its own."""

    name: str  # of its runs
    recipe: str
    settings: tuple[str, ...]
    options: RunOptions
    stacks: list[str]  # that load its drafter
    parameters: int  # that are trained
    costs: dict[int, float] = field(default_factory=dict)  # of a decode step by batch size, in plain steps

    def __str__(self) -> str:
        return " ".join([self.recipe, *self.settings])


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """Seconds for each part."""

    total: float
    foreign: bool = False  # whether the target answers the data's prompts first

    @property
    def answer_seconds(self) -> float:
        """For the target's answers, where it writes any."""
        return ANSWERS * self.total

    @property
    def answers(self) -> float:
        return self.answer_seconds if self.foreign else 0.0

    @property
    def race(self) -> float:
        return RACE * (self.total - self.answers)

    @property
    def minutes(self) -> float:
        """Of the last measurement."""
        return min(MOST_MINUTES, max(0.5, MEASURE * self.total / 60))

    @property
    def compares(self) -> bool:
        """Whether families that need no training are measured too."""
        return self.total >= COMPARED

    @property
    def reserve(self) -> float:
        """What follows the winner's training: measuring greedy and sampled, comparing, exporting."""
        return 60 * (2.5 if self.compares else 2) * self.minutes + 6 * START

    def rest(self, candidates: int) -> float:
        """For the winner's training, after the race."""
        return self.total - self.answers - (self.race if candidates > 1 else 0.0) - self.reserve

    def most_candidates(self, least: float, parallel: int = 1) -> int:
        """How many can have `least` seconds each in the first round, `parallel` at a time."""
        counts = (n for n in range(2, 64) if self.race / rungs_of(n) / math.ceil(n / parallel) >= least)
        return max(counts, default=1)


def rungs_of(candidates: int) -> int:
    """Rounds until one is left, if half of them go each time."""
    return math.ceil(math.log2(candidates))


class Halving(optuna.pruners.BasePruner):
    """Prunes the worse half of a round, and whoever's interval is below the best one's."""

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Optuna's interface. Rivals are trials that have reported on this round, and have `points` among their attributes. On
        several nodes others may follow.
        """
        number = trial.last_step
        assert number is not None
        rivals = [other for other in study.get_trials(deepcopy=False) if number in other.intermediate_values]
        ranked = sorted(rivals, key=lambda other: other.intermediate_values[number], reverse=True)
        place = next(i for i, other in enumerate(ranked) if other.number == trial.number)
        best, own = (other.user_attrs["points"][number] for other in (ranked[0], trial))
        return place > 0 and (place >= (len(ranked) + 1) // 2 or own["high"] < best["low"])


@dataclass
class CandidateRace:
    """A study in a folder, and the commands that move its trials on."""

    folder: Path
    study: Study
    candidates: list[Candidate]
    budget: TimeBudget
    batch_sizes: list[int]
    parallel: int  # candidates that train at the same time
    words: list[str]  # overrides of every candidate's command
    say: Callable[[str], None]
    interrupt: Interrupt
    flags: list[str] = field(default_factory=list)  # of the command line, for every command
    watch: Callable[[str, float], None] = lambda label, spent: None  # what is running, and the seconds that are spent
    share: tuple[int, int] | None = None  # of several nodes, which this is, from 1, and their number
    began: float = field(default_factory=monotonic)
    spent_before: float = field(init=False)  # seconds, when the same command was ended, and on other nodes

    def __post_init__(self) -> None:
        self.spent_before = sum(self._spent())
        for trial in self._open():
            trial.set_user_attr("failed", None)  # what failed is tried again, once for each start

    @staticmethod
    def study_of(folder: Path, candidates: Sequence[str]) -> Study:
        """The study of a folder. A new one has a trial for each candidate, and keeps them: how many a budget allows depends on
        the machine's speed at the time.
        """
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
        arguments: dict[str, Any] = {"direction": "maximize", "load_if_exists": True, "pruner": Halving()}
        study = optuna.create_study(storage=storage, study_name="auto", **arguments)
        begun = {trial.user_attrs["name"] for trial in study.get_trials(deepcopy=False)}
        if candidates and "candidates" not in study.user_attrs:
            choice = optuna.distributions.CategoricalDistribution(list(candidates))
            for name in (name for name in candidates if name not in begun):
                study.enqueue_trial({"candidate": name}, user_attrs={"name": name})
                study.ask({"candidate": choice})
            study.set_user_attr("candidates", list(candidates))
        return study

    @property
    def spent(self) -> float:
        """Seconds, over all times that the command was started."""
        return self.spent_before + monotonic() - self.began

    def _spent(self) -> tuple[float, float]:
        """Seconds of this part before it was ended; of the others before this one. Shares of a race run at the same time."""
        attributes = self.study.user_attrs
        whole, shares = attributes.get("spent", 0.0), {k: v for k, v in attributes.items() if k.startswith("spent ")}
        return (shares.get(self._spent_key, 0.0), whole) if self.share else (whole, max(shares.values(), default=0.0))

    @property
    def _spent_key(self) -> str:
        return f"spent {self.share[0]}" if self.share else "spent"

    @property
    def sizes(self) -> list[str]:
        """The batch sizes as a command's override."""
        return [f"measure.batch_sizes=[{','.join(map(str, self.batch_sizes))}]"]

    def winner(self) -> Trial:
        """Run what is left of the race. Returns the winner's trial; the others are ended. Raises UserError where all fail."""
        self.run()
        running = self.running()
        if not running:
            reasons = "; ".join(f"{trial.user_attrs['name']}: {trial.user_attrs['failed']}" for trial in self._open())
            raise UserError(f"every candidate has failed: {reasons}; {self.folder / 'logs'} has their whole output")
        best = max(running, key=lambda trial: (trial.user_attrs.get("points") or [{"value": 0.0}])[-1]["value"])
        for trial in running:
            if trial.number != best.number:  # on several nodes a round's first trials have had no rivals
                self.study.tell(trial, state=TrialState.PRUNED)
        return best

    def run(self) -> None:
        """Run what is left of the race, or of this node's share."""
        self._each(self._try, self.running())
        rungs = rungs_of(len(self.study.user_attrs["candidates"]))
        for number in range(rungs):
            running = self.running()
            if not running or len(self.running(every=True)) == 1:
                break
            seconds = self.budget.race / rungs / math.ceil(len(running) / self.parallel)
            self._each(partial(self._advance, number=number, seconds=seconds), running)
            self._drop(number)

    def running(self, every: bool = False) -> list[Trial]:
        """The trials that are left, in the order of the candidates: this node's, or every node's."""
        return [trial for trial in self._open(every) if not trial.user_attrs.get("failed")]

    def _open(self, every: bool = False) -> list[Trial]:
        trials = self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        number, nodes = self.share if self.share and not every else (1, 1)
        return [Trial(self.study, trial._trial_id) for trial in trials if trial.number % nodes == number - 1]

    def candidate(self, trial: Trial | FrozenTrial) -> Candidate:
        """The trial's candidate."""
        return next(each for each in self.candidates if each.name == trial.user_attrs["name"])

    def run_of(self, trial: Trial | FrozenTrial) -> Path | None:
        """The candidate's run directory; None before its first step."""
        runs = sorted((self.folder / "runs" / trial.user_attrs["name"]).glob("*/run.json"))
        return runs[-1].parent if runs else None

    def fit(self, trial: Trial, label: str, steps: int, words: Sequence[str], place: int = ALL) -> bool:
        """Train a candidate to so many steps. False, with the reason in the study, if that fails."""
        each, run, began = self.candidate(trial), self.run_of(trial), monotonic()
        line = [
            *("fit", f"recipe={each.recipe}", *each.settings, *self.words, f"name={each.name}"),
            *(f"output={self.folder / 'runs'}", f"train.steps={steps}", "train.exact_steps=true"),
            f"logger.group=auto-{self.folder.name.rpartition('-')[2]}",
            *(*self.sizes, *words),
            *([f"resume={run}"] if run is not None else []),
        ]
        if failed := self.command(f"{each.name} {label}", line, place):
            self._fail(trial, failed)
            return False
        progress = Progress.of(list_checkpoints(self.run_of(trial) / "checkpoints")[-1])  # type: ignore[operator]
        trial.set_user_attr("steps", progress.step)
        trial.set_user_attr("seconds", progress.seconds)
        trial.set_user_attr(f"start {label}", max(0.0, monotonic() - began - progress.seconds))
        return True

    def command(self, label: str, line: Sequence[str], place: int = ALL) -> str | None:
        """Run a drafttrain command, with its output in logs/. Returns why it failed; None if it has not.

        place: among the commands that share the machine's GPUs. At a signal the command saves what it has, and Interrupted is
        raised.
        """
        arguments = [line[0], *self.flags, *line[1:]]
        with self._log(label).open("w", encoding="utf-8") as output:
            print(shlex.join(["drafttrain", *arguments]), file=output, flush=True)
            process = subprocess.Popen(
                [sys.executable, "-m", "drafttrain", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self._devices(place),
            )
            try:
                while process.poll() is None and not self.interrupt.requested:
                    self.watch(label, self.spent)
                    sleep(0.1)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        self.study.set_user_attr(self._spent_key, self.spent - self._spent()[1])
        if self.interrupt.requested:
            raise Interrupted(f"during {label}; the same command goes on")
        return None if process.returncode == 0 else self._said(label, "drafttrain: ")

    def _said(self, label: str, start: str) -> str:
        """The last line of a command's output that starts so, else the last of all."""
        lines = self._log(label).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return ([line.removeprefix(start) for line in lines if line.startswith(start)] or lines)[-1]

    def _log(self, label: str) -> Path:
        return self.folder / "logs" / f"{label.replace(' ', '-')}.log"

    def _fail(self, trial: Trial, reason: str) -> None:
        trial.set_user_attr("failed", reason)
        self.say(f"{trial.user_attrs['name']} is left out: {reason}")

    def _each(self, work: Callable[[Trial, int], None], trials: Sequence[Trial]) -> None:
        """The work for each trial, `parallel` at a time."""
        places = SimpleQueue[int]()
        for place in range(self.parallel):
            places.put(place)

        def placed(trial: Trial) -> None:
            place = places.get()
            try:
                work(trial, place)
            finally:
                places.put(place)

        with ThreadPoolExecutor(self.parallel) as pool:
            for future in [pool.submit(placed, trial) for trial in trials]:
                future.result()

    def _try(self, trial: Trial, place: int) -> None:
        """A few steps, which show what a step takes."""
        if "start try" not in trial.user_attrs:
            self.fit(trial, "try", TRIED, ["measure=off"], place)

    def _advance(self, trial: Trial, place: int, number: int, seconds: float) -> None:
        """Train a candidate for its share of a round, and predict its speedup."""
        points = trial.user_attrs.get("points", [])
        if len(points) > number:
            return
        minutes = min(3.0, max(0.2, PREDICTING * seconds / 60))
        self.plan_steps(trial, f"round {number + 1}", seconds - 60 * minutes - trial.user_attrs["start try"])
        words = [f"tune.minutes={minutes:.3g}", "tune.finalists=1", "measure.minutes=60", "measure.tune_only=true"]
        figures = self.run_of(trial) / FIGURES  # type: ignore[operator]
        figures.unlink(missing_ok=True)
        if not self.fit(trial, f"round {number + 1}", trial.user_attrs[f"until round {number + 1}"], words, place):
            return
        if not figures.is_file():
            self._fail(trial, self._said(f"{trial.user_attrs['name']} round {number + 1}", "note: tuning was left out: "))
            return
        value, low, high = predicted_speedup(json.loads(figures.read_text(encoding="utf-8")))
        attributes = trial.user_attrs
        point = {"seconds": attributes["seconds"], "steps": attributes["steps"], "value": value, "low": low, "high": high}
        trial.set_user_attr("points", [*points, point])
        trial.report(value, number)
        self.say(
            f"round {number + 1}: {attributes['name']}, {attributes['steps']:,} steps, predicted {value:.2f}x ({low:.2f} to "
            f"{high:.2f})"
        )

    def plan_steps(self, trial: Trial, label: str, seconds: float) -> int:
        """The steps until which a candidate trains in this part, from its seconds of training; a repeated part has the same."""
        if f"until {label}" not in trial.user_attrs:
            done, taken = trial.user_attrs["steps"], trial.user_attrs["seconds"]
            further = max(TRIED, round(seconds / (taken / done)))
            trial.set_user_attr(f"until {label}", max(done, min(done + further, self.candidate(trial).options.train.steps)))
        return int(trial.user_attrs[f"until {label}"])

    def _drop(self, number: int) -> None:
        """End the trials that this round prunes. Where one has gone on, the round was ended before."""
        running = self.running()
        if any(len(trial.user_attrs["points"]) > number + 1 for trial in running):
            return
        for trial in running:
            if trial.should_prune():
                self.study.tell(trial, state=TrialState.PRUNED)
        left = ", ".join(trial.user_attrs["name"] for trial in self.running())
        self.say(f"after round {number + 1}: {left or 'none of this node is left'}")

    def _devices(self, place: int) -> dict[str, str]:
        """The environment in which a command sees its share of the GPUs."""
        if place == ALL or self.parallel == 1 or not torch.cuda.is_available():
            return {}
        every = ",".join(map(str, range(torch.cuda.device_count())))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
        share = len(visible) // self.parallel
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[place * share : (place + 1) * share])}
