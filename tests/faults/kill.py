"""SIGKILL, SIGTERM and SIGINT at random moments; the repeated command ends with the same result as an undisturbed run."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import material
from tests.faults.campaign import UNCHANGED, TryResult, broken, failed
from tests.faults.child import Child, Ended, forked, fresh
from tests.faults.composed import cli
from tests.faults.material import MEASURING, TRAINING

INTERRUPTED = (75, 130)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STOPPED = "drafttrain: interrupted"
PREPARING = (
    "prepare.max_new_tokens=10",
    "prepare.samples=3",
    "prepare.temperatures=[0,0.8]",
    "prepare.drop=[empty]",
    "prepare.batch_size=4",
    "prepare.max_length=400",
)
Digests = dict[str, str]


@dataclass(frozen=True, slots=True)
class Command:
    """A command that continues when it is repeated."""

    name: str
    arguments: tuple[str, ...]  # without `out`, which is relative to the try's folder
    result: Callable[[Path], Digests]  # the parts of the try's folder that must be equal in the end, by name
    whole: Callable[[Path], str | None] = lambda folder: None  # errors of the folder right after a kill
    ranks: bool = False  # it starts processes, so that it needs its own Python
    done: str | None = None  # the message of a repeat with nothing left to do


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def of_run(folder: Path) -> Digests:
    """The weights of every checkpoint, the losses, and that there is one finished run."""
    runs = sorted((folder / "runs").glob("*/*/run.json"))
    found = {"runs": str(len(runs))}
    for state in runs:
        run = state.parent
        found["finished"] = str(json.loads(state.read_text())["finished"])
        whole = (path for path in run.glob("checkpoints/step-*") if ".tmp-" not in path.name)
        found |= {path.name: digest(path / "drafter.safetensors") for path in whole}
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found["losses"] = repr([(line["step"], line["loss"]) for line in lines])
    return found


def of_folder(name: str, skip: Iterable[str] = ()) -> Callable[[Path], Digests]:
    """Every file of an output directory."""

    def result(folder: Path) -> Digests:
        out, left_out = folder / name, set(skip)
        files = (path for path in sorted(out.rglob("*")) if path.is_file() and path.name not in left_out)
        return {str(path.relative_to(out)): digest(path) for path in files}

    return result


def of_report(folder: Path) -> Digests:
    """The newest report's figures about tokens; times differ."""
    report = json.loads(sorted(folder.glob("runs/measure/*/report.json"))[-1].read_text())
    (entry,) = report["checkpoints"]
    kept = ("question_id", "tokens", "tau", "emitted", "verifications", "drafted", "accepted", "exact")
    return {"prompts": repr([[line[key] for key in kept] for line in entry["per_prompt"]]), "alpha": repr(entry["alpha"])}


def sound_checkpoints(folder: Path) -> str | None:
    """A checkpoint under its own name is whole at any moment."""
    from drafttrain.train.checkpoint_manager import damage

    for path in folder.glob("runs/*/*/checkpoints/step-*"):
        if ".tmp-" not in path.name and not path.name.endswith(".damaged") and (found := damage(path)):
            return f"{path.name}: {found}"
    return sound_json(folder)


def sound_json(folder: Path) -> str | None:
    """No JSON file under its own name is half-written."""
    for path in folder.rglob("*.json"):
        if ".tmp-" in str(path) or "said" in path.parts:
            continue
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            return f"{path.relative_to(folder)} is half-written: {error}"
    return None


def whole_or_absent(name: str) -> Callable[[Path], str | None]:
    """An output directory exists with everything that it has in the end, or not at all."""

    def whole(folder: Path) -> str | None:
        out = folder / name
        if out.exists() and not any((out / last).is_file() for last in ("drafttrain.json", "README.md", "summary.json")):
            return f"{name} is there without all of its files: {sorted(path.name for path in out.iterdir())}"
        return sound_json(folder)

    return whole


class Kill:
    name = "kill"

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.references: dict[str, tuple[Digests, float, int]] = {}
        self.folder = Path()

    def prepare(self, folder: Path) -> None:
        self.folder = folder / "material"
        material.base(self.folder)
        target = ("target=hf", f"target.path={self.folder / 'target'}")
        given = self.folder / "runs"
        if not list(given.glob("*/*/run.json")):
            fit = (
                "fit",
                *target,
                f"data.path={self.folder / 'data.jsonl'}",
                *TRAINING,
                "measure.enabled=false",
                f"output={given}",
            )
            for recipe in ("eagle3", "medusa"):
                material.must([*fit, f"recipe={recipe}"], self.folder)
        self.commands = commands(self.folder, target, given)

    def attempt(self, draw: random.Random, folder: Path) -> list[TryResult]:
        weights = [1 if command.ranks else 8 for command in self.commands]
        command = draw.choices(self.commands, weights)[0]
        wanted, seconds, steps = self._reference(command, folder.parent)
        kills = draw.choice([1, 1, 2, 3])
        return [self._tried(command, draw, folder, kills, wanted, seconds, steps)]

    def _reference(self, command: Command, folder: Path) -> tuple[Digests, float, int]:
        """The undisturbed result, its seconds, and its number of changes to files."""
        if command.name not in self.references:
            place = folder / "reference"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            child = start(command, place)
            ended = child.wait(300)
            if ended.code:
                raise material.MaterialError(f"{command.name} undisturbed: exit code {ended.code}\n{ended.out}\n{ended.err}")
            self.references[command.name] = command.result(place), ended.seconds, child.steps
            shutil.rmtree(place)
        return self.references[command.name]

    def _tried(
        self, command: Command, draw: random.Random, folder: Path, kills: int, wanted: Digests, seconds: float, steps: int
    ) -> TryResult:
        said, line = [], f"drafttrain {' '.join(command.arguments)}"
        number = draw.choice(SIGNALS)
        what = f"{command.name}, {number.name}"
        for _ in range(kills):
            ended, how = struck(command, draw, folder, number, seconds, steps)
            said.append(how)
            story = "; ".join(said)
            if fault := self._after(command, ended, number, folder):
                return failed(what, "a clean end, and nothing half-written", f"{story}: {fault}", line, ended)
            if ended.code == 0 or finished(folder):
                break
        last = ended if finished(folder) else start(command, folder).wait(300)
        if finished(folder):
            pass  # the signal came after the end
        elif last.code == 2 and command.done is not None and last.line and re.search(command.done, last.line):
            pass  # it was done before the signal
        elif last.code != 0 or broken(last):
            return failed(what, "the same command goes on", f"{story}: exit code {last.code}, {broken(last)}", line, last)
        if differs := difference(wanted, command.result(folder)):
            return failed(what, "what an undisturbed run has", f"{story}: {differs}", line, last)
        if left := [str(path.relative_to(folder)) for path in folder.rglob("*.tmp-*")]:
            return failed(what, "nothing is left aside", f"{story}: {', '.join(left[:5])}", line, last)
        return TryResult(what, UNCHANGED, command=line)

    def _after(self, command: Command, ended: Ended, number: int, folder: Path) -> str | None:
        """The errors right after the signal."""
        if ended.code not in (0, -number, *INTERRUPTED) or (number == signal.SIGKILL and ended.code not in (0, -number)):
            return f"exit code {ended.code}"
        if ended.traceback or ended.late or ended.left:
            return broken(ended)
        if ended.code in INTERRUPTED and STOPPED not in ended.err:
            return f"exit code {ended.code} without a line that says so"
        return command.whole(folder)


def start(command: Command, folder: Path, die_at: tuple[int, int] | None = None) -> Child:
    said = folder.parent / "said"
    if command.ranks:
        return fresh(command.arguments, folder, said)
    return forked(cli(command.arguments), folder, said, die_at)


def struck(command: Command, draw: random.Random, folder: Path, number: int, seconds: float, steps: int) -> tuple[Ended, str]:
    """Run the command and signal it, before one of its changes to files or after some time. Returns how, in words."""
    by_step, step, share = draw.random() < 0.6, draw.randint(1, max(1, steps)), draw.random()
    name = signal.Signals(number).name
    if by_step and steps:
        return start(command, folder, (step, number)).wait(300), f"{name} before change {step} of {steps}"
    child = start(command, folder)
    while not child.ready:
        time.sleep(0.001)
    until = time.monotonic() + share * seconds
    while time.monotonic() < until and child.poll() is None:
        time.sleep(0.002)
    child.signal(number, group=command.ranks and number == signal.SIGKILL and draw.random() < 0.5)
    return child.wait(300), f"{name} after {share * seconds:.2f} of {seconds:.2f} s"


def finished(folder: Path) -> bool:
    """Whether a run of `fit` has nothing left to do."""
    return any(json.loads(state.read_text())["finished"] for state in folder.glob("runs/*/*/run.json"))


def difference(wanted: Digests, got: Digests) -> str | None:
    if wanted == got:
        return None
    names = [name for name in sorted({*wanted, *got}) if wanted.get(name) != got.get(name)]
    return f"{', '.join(names[:4])}: {wanted.get(names[0], 'not there')[:200]} became {got.get(names[0], 'not there')[:200]}"


def commands(folder: Path, target: tuple[str, ...], given: Path) -> list[Command]:
    data, prompts = f"data.path={folder / 'data.jsonl'}", folder / "prompts.jsonl"
    fit = ("fit", *target, data, *TRAINING, "measure.enabled=false", "output=runs", "resume=auto")
    eagle3, medusa = (sorted(given.glob(f"{name}/*/checkpoints/step-*"))[-1] for name in ("eagle3", "medusa"))
    prepare = ("prepare", *target, f"data.path={prompts}", "out=own", *PREPARING)
    measure = ("measure", f"checkpoint={eagle3}", f"prompts={prompts}", *MEASURING, "output=runs")
    there = "already|exists|overwrite"
    exports = [
        Command(
            f"export {stack}",
            ("export", f"checkpoint={checkpoint}", f"format={stack}", "out=out"),
            of_folder("out"),
            whole_or_absent("out"),
            done=there,
        )
        for checkpoint, stack in ((eagle3, "vllm"), (medusa, "all"))
    ]
    return [
        Command("fit medusa", (*fit, "recipe=medusa"), of_run, sound_checkpoints),
        Command("fit eagle3", (*fit, "recipe=eagle3"), of_run, sound_checkpoints),
        Command("fit cached", (*fit, "recipe=eagle3", "features=cached", "features.dir=features"), of_run, sound_checkpoints),
        Command("prepare", prepare, of_folder("own", ["provenance.json"]), whole_or_absent("own"), done=there),
        *exports,
        Command("measure", measure, of_report, sound_json),
        *(
            Command(f"fit zero{stage}, 2 processes", (*fit, "recipe=medusa", f"deepspeed=zero{stage}", "launcher.nproc=2"),
                    of_run, sound_checkpoints, ranks=True)
            for stage in (2, 3)
        ),
        Command("prepare, 2 processes", (*prepare, "launcher.nproc=2"), of_folder("own", ["provenance.json"]),
                whole_or_absent("own"), ranks=True, done=there),
    ]  # fmt: skip
