"""An engine's process that stays alive to be timed, with or without speculation.

It is started as in `process.py`, with the same job, whose `timed` has

    speculative                 whether it drafts
    dtype, threads, device      the dtype, the CPU threads, and whether the target is on `cpu` or `cuda`
    batch                       upper bound of prompts decoded together
    eager                       true, or left out: whether to skip compilation (`Resources.timed`)

The script's `opened(job)`, a context manager, makes the engine ready and yields its description (the fields of
`drafttrain.engines.answers.EngineInfo`) and a function. `serve.py` writes the description to stdout as one line. For each line
of prompt numbers that it then reads from stdin, it writes the function's answer. All other output goes to the log. The script
takes the times itself, so that they include neither the pipe nor JSON. An answer has

    texts                              per prompt `{"tokens": [ids], "first": s, "ended": s, "ahead": n}`, as in `TimedText`
    verifications, drafted, accepted   for all of them together; null where there are no drafts, or no counts
    accepted_by_position               decode steps that accepted a draft at position 1, 2, ...; null or left out likewise

A process next to training (`BackgroundEngine`) gets all its prompts at the start, and its answers are read at the end: it is a
timed job with speculation whose stdin and stdout are files. It is the leader of a session of its own, so that Ctrl-C in the
terminal and the signals of a launcher do not reach it. When the process that started it has ended, `serve.py` removes its files
and ends it, also after kill -9.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.engines.answers import EngineInfo, TimedText, WaveOutputs
from drafttrain.engines.process import ENGINES, Engine, EngineJob, command, environment, result_of, without_launcher

PATIENCE = 30.0  # seconds for a process to end by itself
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Serving:
    """A process that is ready."""

    engine: Engine
    process: subprocess.Popen[str]
    place: Path
    about: EngineInfo

    def answer(self, wave: Sequence[int]) -> WaveOutputs:
        """Decode these prompts together. Raises UserError with the engine's own message where it fails."""
        return answer_of(self.engine, _exchange(self.engine, self.process, self.place, json.dumps(list(wave))))


def answer_of(engine: Engine, found: dict[str, Any]) -> WaveOutputs:
    """A script's answer. Raises UserError for another form."""
    try:
        texts = [TimedText(len(t["tokens"]), tuple(t["tokens"]), t["first"], t["ended"], t["ahead"]) for t in found["texts"]]
        accepted_counts = found.get("accepted_by_position")
        by_position = None if accepted_counts is None else tuple(map(int, accepted_counts))
        return WaveOutputs(texts, found["verifications"], found["drafted"], found["accepted"], by_position)
    except (KeyError, TypeError) as error:
        raise UserError(f"{engine.label}: its answer does not have the required form; correct the script") from error


@contextmanager
def serving(name: str, python: Path, job: EngineJob, place: Path) -> Iterator[Serving]:
    """Start an engine's process, wait until it is ready, and end it.

    place: a folder for its files. Converted files go to `place`/../scratch, where the engine's other process finds them.
    Raises UserError with the engine's own message where it does not start.
    """
    engine, scratch = ENGINES[name], place.parent / "scratch"
    for folder in (place, scratch):
        folder.mkdir(exist_ok=True)
    (place / "job.json").write_text(json.dumps(asdict(job) | {"scratch": str(scratch)}), encoding="utf-8")
    with (place / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command(name, python, place),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment(engine), text=True, encoding="utf-8",
        )  # fmt: skip
    try:
        info = EngineInfo(**_exchange(engine, process, place, None))
        yield Serving(engine, process, place, info)
    finally:
        _end(process)


def _exchange(engine: Engine, process: subprocess.Popen[str], workdir: Path, line: str | None) -> dict[str, Any]:
    """Write a line, or none, and read one."""
    assert process.stdin is not None and process.stdout is not None
    try:
        if line is not None:
            print(line, file=process.stdin, flush=True)
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        result_of(engine, workdir, process.wait())
        raise UserError(f"{engine.label} ended too early; measure again")
    content: dict[str, Any] = json.loads(answer)
    return content


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended already
        process.stdin.close()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@dataclass(frozen=True, slots=True)
class Resources:
    """The part of the machine that the engine may use."""

    device: str = CPU  # `cpu`, or GPUs as in CUDA_VISIBLE_DEVICES
    threads: int = 1  # CPU threads

    def timed(self, dtype: str, batch: int) -> dict[str, Any]:
        """The job's `timed`. `eager`: without compilation, which takes longer than a few prompts."""
        device_type = CPU if self.device == CPU else "cuda"
        return {
            "speculative": True, "dtype": dtype, "threads": self.threads, "device": device_type, "batch": batch, "eager": True,
        }  # fmt: skip

    def variables(self, engine: Engine) -> dict[str, str]:
        """The process's whole environment, without the launcher's variables."""
        base_variables = without_launcher(environment(engine))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        gpus = {"CUDA_VISIBLE_DEVICES": "" if self.device == CPU else self.device}
        return base_variables | engine.limited | threads | gpus


@dataclass(frozen=True, slots=True)
class BackgroundEngine:
    """A process that was started."""

    engine: Engine
    process: subprocess.Popen[bytes]
    place: Path  # the folder of its files
    began: float  # by `monotonic`

    @property
    def seconds(self) -> float:
        """Seconds since it was started."""
        return monotonic() - self.began

    @property
    def log(self) -> Path:
        return self.place / "log"

    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def answers(self) -> tuple[EngineInfo, list[WaveOutputs]]:
        """The result of a process that has ended. Raises UserError with the engine's own message where it failed."""
        result_of(self.engine, self.place, self.process.returncode)
        with suppress(ValueError, TypeError):
            info, *outputs = map(json.loads, (self.place / "answers").read_text(encoding="utf-8").splitlines())
            return EngineInfo(**info), [answer_of(self.engine, output) for output in outputs]
        raise UserError(f"{self.engine.label}: its answers do not have the required form; correct the script")


def start_background(
    name: str, python: Path, job: EngineJob, place: Path, waves: Sequence[Sequence[int]], resources: Resources
) -> BackgroundEngine:
    """Start an engine on these waves of prompt numbers. place: a folder that has the export, and that is removed with the
    process.
    """
    engine, scratch = ENGINES[name], place / "scratch"
    scratch.mkdir(exist_ok=True)
    content = asdict(replace(job, parent=os.getpid())) | {"scratch": str(scratch)}
    (place / "job.json").write_text(json.dumps(content), encoding="utf-8")
    (place / "waves").write_text("".join(json.dumps(list(wave)) + "\n" for wave in waves), encoding="utf-8")
    with (place / "waves").open("rb") as stdin, (place / "answers").open("wb") as stdout, (place / "log").open("wb") as log:
        process = subprocess.Popen(
            command(name, python, place), stdin=stdin, stdout=stdout, stderr=log, env=resources.variables(engine),
            start_new_session=True,
        )  # fmt: skip
    return BackgroundEngine(engine, process, place, monotonic())
