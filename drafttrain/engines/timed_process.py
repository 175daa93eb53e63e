"""An engine's process that stays alive to be timed, with or without speculation.

It is started as in `process.py`, with the same job, whose `timed` has

    speculative                 whether it drafts
    dtype, threads, device      the dtype, the CPU threads, and whether the target is on `cpu` or `cuda`
    batch                       upper bound of prompts decoded together
    eager                       true, or left out: whether to skip compilation (`background.py`)

The script's `opened(job)`, a context manager, makes the engine ready and yields its description (the fields of
`drafttrain.engines.answers.EngineInfo`) and a function. `serve.py` writes the description to stdout as one line. For each line
of prompt numbers that it then reads from stdin, it writes the function's answer. All other output goes to the log. The script
takes the times itself, so that they include neither the pipe nor JSON. An answer has

    texts                              per prompt `{"tokens": [ids], "first": s, "ended": s, "ahead": n}`, as in `TimedText`
    verifications, drafted, accepted   for all of them together; null where there are no drafts, or no counts
    accepted_by_position               decode steps that accepted a draft at position 1, 2, ...; null or left out likewise
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.engines.answers import EngineInfo, TimedText, WaveOutputs
from drafttrain.engines.process import ENGINES, Engine, EngineJob, command, environment, result_of

PATIENCE = 30.0  # seconds for a process to end by itself


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
