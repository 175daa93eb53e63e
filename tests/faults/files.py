"""Flipped bits, truncation, deletion and swaps in every file that a command reads.

The command names the file in one line, or gives the same result as without the damage.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import material
from tests.faults.campaign import ACCEPTED, REFUSED, TryResult, broken, failed, judged
from tests.faults.child import Ended
from tests.faults.damage import strike
from tests.faults.kill import Digests, difference, digest, of_folder
from tests.faults.material import MEASURING, TRAINING

# Users' own files, which have no checksum: by the folder in a try, with the reason. A damaged file may still be legal, with
# another meaning, and a command then uses it. Even so it may not end with a traceback, hang, or give an unclear message.
OWN = {
    "target": "a target is the user's model: no file of it has a checksum, its fingerprint samples 64 values of each weight",
    "data": "conversations and prompts are the user's text: a flipped letter is another letter",
    "config": "configuration is written by hand",
}
LOGS = {"metrics.jsonl": "losses"}  # a log without a checksum: damaged lines are left out, so the result may differ


@dataclass(frozen=True, slots=True)
class Reader:
    """A command that reads the damaged file."""

    name: str
    arguments: tuple[str, ...]
    # the part of its output or of the try's folder that must be equal; None: only the exit code, since times decide it
    result: Callable[[Path, Ended], Digests] | None
    weight: float = 1.0  # how often it is tried


@dataclass(frozen=True, slots=True)
class Artifact:
    """A folder of the material, copied for each try."""

    name: str
    folder: str
    needs: tuple[str, ...]  # other folders that the readers need
    readers: tuple[Reader, ...]
    own: str | None = None  # a key of OWN


def said(folder: Path, ended: Ended) -> Digests:
    return {"stdout": ended.out}


def report(folder: Path, ended: Ended) -> Digests:
    (path,) = folder.glob("result/measure/*/report.json")
    (entry,) = json.loads(path.read_text())["checkpoints"]
    kept = ("question_id", "tokens", "tau", "emitted", "verifications", "drafted", "accepted", "exact")
    return {"prompts": repr([[line[key] for key in kept] for line in entry["per_prompt"]]), "alpha": repr(entry["alpha"])}


def exported(folder: Path, ended: Ended) -> Digests:
    return of_folder("result")(folder)


def trained(folder: Path, ended: Ended) -> Digests:
    """The weights and losses of the one run under `result` or `runs`."""
    found: Digests = {}
    for state in sorted([*folder.glob("result/*/*/run.json"), *folder.glob("runs/*/*/run.json")]):
        run = state.parent
        found["weights"] = digest(sorted(run.glob("checkpoints/step-*[0-9]"))[-1] / "drafter.safetensors")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found["losses"] = repr([(line["step"], line["loss"]) for line in lines])
    return found


def answered(folder: Path, ended: Ended) -> Digests:
    return of_folder("result", ["provenance.json"])(folder)


TARGET = ("target=hf", "target.path=target")
FIT = ("fit", *TARGET, *TRAINING, "measure.enabled=false")
PROMPTS = "prompts=data/prompts.jsonl"


def measure(checkpoint: str, *more: str) -> Reader:
    return Reader(
        "measure", ("measure", *TARGET, f"checkpoint={checkpoint}", PROMPTS, *MEASURING, "output=result", *more), report
    )


def generate(checkpoint: str) -> Reader:
    asked = ("generate", *TARGET, f"checkpoint={checkpoint}", "prompt=hello there", "decode.max_new_tokens=16")
    return Reader("generate", asked, said)


def export(checkpoint: str, stack: str) -> Reader:
    return Reader("export", ("export", *TARGET, f"checkpoint={checkpoint}", f"format={stack}", "out=result"), exported)


def artifacts() -> list[Artifact]:
    made = []
    for family, stack in (("eagle3", "vllm"), ("medusa", "vllm"), ("draft_model", "transformers"), ("medusa2", "vllm")):
        checkpoint = f"{family}/step-00006"
        tune = ("tune", *TARGET, f"checkpoint={checkpoint}", PROMPTS, "tune.minutes=0.02", "tune.repeats=1", "tune.finalists=2",
                "decode.max_new_tokens=16", "measure.limit=4", "output=result")  # fmt: skip
        readers: tuple[Reader, ...] = (
            measure(checkpoint), generate(checkpoint), export(checkpoint, stack),
            Reader("tune", tune, None, 0.4),
        )  # fmt: skip
        kind = "LoRA checkpoint" if family == "medusa2" else "checkpoint"
        made.append(Artifact(kind, checkpoint, ("target", "data", family), readers))
    go_on = Reader(
        "fit resume=auto", (*FIT, "data.path=data/data.jsonl", "recipe=eagle3", "output=runs", "resume=auto"), trained
    )
    made.append(Artifact("run", "runs", ("target", "data", "runs"), (go_on,)))
    python = f"engine_python={sys.executable}"
    for name, family, stack in EXPORTS:
        folder = f"exports/{name}"
        verify = ("verify", *TARGET, "engine=transformers", f"checkpoint={family}/step-00006", f"out={folder}", python, PROMPTS)
        engines = [Reader("verify", (*verify, "measure.limit=2", "decode.max_new_tokens=8"), None, 0.1)] * (
            stack == "transformers"
        )
        readers = (measure(folder), generate(folder), *engines)
        made.append(Artifact(f"export {stack}", folder, ("target", "data", family, folder), readers))
    cached = ("fit", *TARGET, *TRAINING, "measure.enabled=false", "data.path=data/data.jsonl", "recipe=eagle3", "output=result",
              "features=cached", "features.dir=features")  # fmt: skip
    made.append(Artifact("feature cache", "features", ("target", "data", "features"), (Reader("fit", cached, trained, 2.0),)))
    prepared = (*FIT, "data.path=prepared", "recipe=eagle3", "output=result")
    made.append(
        Artifact("prepared data", "prepared", ("target", "data", "prepared"),
                 (Reader("fit", prepared, trained),
                  Reader("inspect", ("inspect", *TARGET, "data.path=prepared", "out=result.html"), said)))
    )  # fmt: skip
    tokens = (*FIT, "data.path=data/data.jsonl", "data.workers=1", "data.cache=tokens", "recipe=eagle3", "output=result")
    made.append(Artifact("prepared tokens", "tokens", ("target", "data", "tokens"), (Reader("fit", tokens, trained),)))
    ask = ("prepare", *TARGET, "data.path=data/prompts.jsonl", "out=result", "prepare.max_new_tokens=6", "prepare.drop=[empty]",
           "prepare.max_length=400")  # fmt: skip
    fit = Reader("fit", (*FIT, "data.path=data/data.jsonl", "recipe=medusa", "output=result", "train.steps=2"), trained)
    plain = Reader("generate", ("generate", *TARGET, "prompt=hello there", "decode.max_new_tokens=16"), said)
    readers = (measure("eagle3/step-00006"), plain, Reader("prepare", ask, answered), fit)
    made.append(Artifact("target", "target", ("target", "data", "eagle3"), readers, "target"))
    made.append(Artifact("user's data", "data", ("target", "data", "eagle3"), (fit, measure("eagle3/step-00006"),
                         Reader("prepare", ask, answered)), "data"))  # fmt: skip
    compare = Reader("compare", ("compare", "reports/a", "reports/b"), said)
    made.append(Artifact("report", "reports", ("reports",), (compare,), None))
    simulate = Reader("simulate", ("simulate", "report=reports/a", "out=result.png"), None, 0.3)
    made.append(Artifact("report of simulate", "reports/a", ("reports",), (simulate,), None))
    return made


EXPORTS = (("eagle3", "eagle3", "vllm"), ("medusa", "medusa", "vllm"), ("draft_model", "draft_model", "transformers"))


class Files:
    """A try damages one file of an artifact and runs one command that reads it."""

    name = "files"

    def __init__(self) -> None:
        self.folder = Path()
        self.artifacts = artifacts()
        self.wanted: dict[tuple[str, str, str], Digests | None] = {}

    def prepare(self, folder: Path) -> None:
        self.folder = folder / "material"
        if not (self.folder / "ready").is_file():
            make(self.folder)

    def attempt(self, draw: random.Random, folder: Path) -> list[TryResult]:
        artifact = draw.choice(self.artifacts)
        reader = draw.choices(artifact.readers, [one.weight for one in artifact.readers])[0]
        wanted = self._wanted(artifact, reader, folder)
        self._copy(artifact, folder)
        files = sorted(path for path in (folder / artifact.folder).rglob("*") if path.is_file())
        struck, how = strike(files, draw)
        names = [path.name for path in struck]
        what = f"{artifact.name}, {reader.name}"
        shown = (
            f"{how} in {', '.join(str(path.relative_to(folder)) for path in struck)}; drafttrain {' '.join(reader.arguments)}"
        )
        ended = material.run(reader.arguments, folder, folder.parent / "said")
        if artifact.own is not None:
            return [own(ended, what, shown)]

        def same() -> str | None:
            if reader.result is None or wanted is None:
                return None
            try:
                found, logged = reader.result(folder, ended), {LOGS[name] for name in names if name in LOGS}
                return difference(*({k: v for k, v in one.items() if k not in logged} for one in (wanted, found)))
            except (OSError, ValueError, KeyError, IndexError) as error:
                return f"no result: {error!r}"

        return [judged(ended, what, shown, same, names)]

    def _copy(self, artifact: Artifact, folder: Path) -> None:
        for name in artifact.needs:
            shutil.copytree(self.folder / name, folder / name, dirs_exist_ok=True)

    def _wanted(self, artifact: Artifact, reader: Reader, folder: Path) -> Digests | None:
        """The reader's result for the undamaged artifact, at the same place."""
        key = (artifact.name, artifact.folder, reader.name)
        if key not in self.wanted:
            self._copy(artifact, folder)
            ended = material.run(reader.arguments, folder, folder.parent / "said")
            if ended.code or broken(ended):
                raise material.MaterialError(f"{key} undamaged: exit code {ended.code}\n{ended.out}\n{ended.err}")
            self.wanted[key] = None if reader.result is None else reader.result(folder, ended)
            shutil.rmtree(folder)
            folder.mkdir()
        return self.wanted[key]


def own(ended: Ended, what: str, command: str) -> TryResult:
    """For a user's own file: one line, or a run without traceback."""
    expected = "exit code 2 in one line, or a run without a traceback"
    if fault := broken(ended):
        return failed(what, expected, fault, command, ended)
    if ended.line is not None:
        return TryResult(what, REFUSED, command=command)
    if ended.code:
        return failed(what, expected, f"exit code {ended.code}", command, ended)
    return TryResult(what, ACCEPTED, command=command)


def make(folder: Path) -> None:
    """Make the artifacts with the commands themselves."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    base = folder / "base"
    material.base(base)
    shutil.move(base / "target", folder / "target")
    shutil.move(base, folder / "data")
    data, must = "data.path=data/data.jsonl", material.must
    for family in ("eagle3", "medusa", "draft_model", "medusa2"):
        must([*FIT, data, f"recipe={family}", f"output=made-{family}"], folder)
        run = material.only_run(folder / f"made-{family}")
        shutil.copytree(run / "checkpoints" / "step-00006", folder / family / "step-00006")
    for name, family, stack in EXPORTS:
        must(["export", *TARGET, f"checkpoint={family}/step-00006", f"format={stack}", f"out=exports/{name}"], folder)
    must([*FIT, data, "recipe=eagle3", "output=runs", "resume=auto"], folder)
    interrupt(material.only_run(folder / "runs"))
    must([*FIT, data, "recipe=eagle3", "output=made-cached", "features=cached", "features.dir=features"], folder)
    must([*FIT, data, "recipe=eagle3", "output=made-tokens", "data.workers=1", "data.cache=tokens"], folder)
    must(["prepare", *TARGET, data, "out=prepared", "prepare.max_new_tokens=8", "prepare.drop=[empty]"], folder)
    for name, family in (("a", "eagle3"), ("b", "medusa")):
        must(["measure", *TARGET, f"checkpoint={family}/step-00006", PROMPTS, *MEASURING, f"output=made-{name}"], folder)
        (report,) = (folder / f"made-{name}").glob("measure/*/report.json")
        shutil.copytree(report.parent, folder / "reports" / name)
    for path in folder.glob("made-*"):
        shutil.rmtree(path)
    (folder / "ready").touch()


def interrupt(run: Path) -> None:
    """Cut a run back to its second checkpoint, as if it had been killed there."""
    shutil.rmtree(run / "checkpoints" / "step-00006")
    state = run / "run.json"
    state.write_text(state.read_text().replace('"finished": true', '"finished": false'))
