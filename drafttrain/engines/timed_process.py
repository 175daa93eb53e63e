"""A process of an engine that stays, so that it can be timed beside another: with speculation, or plain.

It is started as in `engine.py`, with the same job, whose `timed` is

- `speculative`: whether it drafts
- `dtype`, `threads`, `device`: in what it computes, on how many threads of a CPU, and whether the target is on `cpu` or `cuda`
- `batch`: prompts decoded together at most

The script's `opened(job)`, a context manager, makes the engine ready and gives what it says of itself (the fields of
`drafttrain.engines.answers.About`), and a function. `serve.py` writes the former to stdout as a line; for each line of
prompts' numbers that it then reads from stdin it writes what the function answers. What else is printed goes to the log. Times
are the script's own, so that neither the pipe nor its JSON is in them. An answer:

- `texts`: of each prompt `{"tokens": [ids], "first": s, "ended": s, "ahead": n}`, as in `drafttrain.engines.answers.Text`
- `verifications`, `drafted`, `accepted`: of all of them together; null where nothing is drafted, or the engine does not tell
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
from drafttrain.engines.answers import About, Answer, Text
from drafttrain.engines.process import ENGINES, Engine, Job, command, environment, result_of

PATIENCE = 30.0  # seconds for a process to end by itself


@dataclass(frozen=True, slots=True)
class Serving:
    """A process that is ready."""

    engine: Engine
    process: subprocess.Popen[str]
    place: Path
    about: About

    def answer(self, wave: Sequence[int]) -> Answer:
        """Raises UserError with the engine's own words where it fails."""
        told = _asked(self.engine, self.process, self.place, json.dumps(list(wave)))
        try:
            texts = [Text(len(t["tokens"]), tuple(t["tokens"]), t["first"], t["ended"], t["ahead"]) for t in told["texts"]]
            return Answer(texts, told["verifications"], told["drafted"], told["accepted"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{self.engine.label}: its answer is not of the form that is asked for; mend the script") from error


@contextmanager
def serving(name: str, python: Path, job: Job, place: Path) -> Iterator[Serving]:
    """Start it, wait until it is ready, and end it. place: a folder for its files; what it converts lies in `place`/../scratch,
    where the engine's other process finds it.

    Raises UserError with the engine's own words where it does not come up.
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
        about = About(**_asked(engine, process, place, None))
        yield Serving(engine, process, place, about)
    finally:
        _end(process)


def _asked(engine: Engine, process: subprocess.Popen[str], place: Path, line: str | None) -> dict[str, Any]:
    """Write a line, or none, and read one."""
    assert process.stdin is not None and process.stdout is not None
    try:
        if line is not None:
            print(line, file=process.stdin, flush=True)
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        result_of(engine, place, process.wait())
        raise UserError(f"{engine.label} ended before it was told to; measure again")
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
