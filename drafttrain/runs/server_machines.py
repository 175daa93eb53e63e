"""Trainers and machines of servers find each other by files in a folder of the run, which all of them see.

- `wanted.json`: the first trainer process writes it under a new id, says in it what servers must give, and writes it again
  every `BEAT` seconds with a greater `beat`. It goes away when training has ended.
- `machine-NAME.json`: a machine of servers writes it once its servers answer: their addresses, or why there are none, and the
  id that this answers.

A trainer that starts again asks under another id; servers that give what it wants go on. A machine that starts again takes the
ports that it had, because trainers know its addresses.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from drafttrain.core.errors import UserError
from drafttrain.core.files import HOST
from drafttrain.engines.states_command import ServedStates
from drafttrain.runs.options import RunOptions

MEETING = "DRAFTTRAIN_SERVERS"  # environment variable of training processes: the folder
BEAT, LOOK = 2.0, 0.5  # seconds between two signs of life, and between two looks
COMING = 1800.0  # seconds for the servers of all machines to answer
READS = 5  # of a file that is replaced while it is read, which is an error on NFS
WANTED, MACHINE = "wanted.json", "machine-*.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the trainers ask for."""

    id: str
    beat: int
    served: ServedStates


@dataclass(frozen=True, slots=True)
class Machine:
    """The answer of a machine of servers."""

    id: str  # of the request that it answers
    urls: tuple[str, ...] = ()
    error: str | None = None  # why there are no servers


def meeting_folder(options: RunOptions) -> Path:
    """The folder of a run. All its machines have the same output and rendezvous."""
    rendezvous_name = re.sub(r"[^\w.-]", "_", str(options.launcher.rendezvous))
    return Path(options.output).expanduser().absolute() / options.name / "servers" / rendezvous_name


@contextmanager
def asked(served: ServedStates, machines: int, folder: Path, say: Callable[[str], None]) -> Iterator[list[str]]:
    """The addresses of all machines' servers. At the end, unless by an exception, the machines hear that training has ended.

    Raises UserError where a machine has none, or does not answer.
    """
    request, closing = uuid4().hex, threading.Event()
    beating = threading.Thread(target=_beat, args=(folder, request, served, closing), daemon=True)
    beating.start()
    try:
        yield _answers(folder, request, machines, say)
        closing.set()
        beating.join()
        end(folder)
    finally:
        closing.set()
        beating.join()


def end(folder: Path) -> None:
    """Tell the machines of servers that training has ended."""
    (folder / WANTED).unlink(missing_ok=True)


def wanted(folder: Path) -> Wanted | None:
    """What is asked for now; None if nothing."""
    content = _read(folder / WANTED)
    return None if content is None else Wanted(content["id"], content["beat"], ServedStates.of(content["served"]))


def answer(folder: Path, machine: Machine) -> None:
    """Write the answer of this machine."""
    _write(_own(folder), asdict(machine))


def earlier_answer(folder: Path) -> Machine | None:
    """What this machine has answered last, maybe before it started again."""
    content = _read(_own(folder))
    return None if content is None else _machine(content)


def leave(folder: Path) -> None:
    """Remove this machine's answer, and the folder when it is empty."""
    _own(folder).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _answers(folder: Path, request: str, machines: int, log: Callable[[str], None]) -> list[str]:
    log(f"features: waiting for the servers of {machines} machine{'' if machines == 1 else 's'}, which takes a minute or more")
    deadline = monotonic() + COMING
    while True:
        replies = [_machine(content) for file in sorted(folder.glob(MACHINE)) if (content := _read(file)) is not None]
        answers = [machine for machine in replies if machine.id == request]
        for machine in answers:
            if machine.error is not None:
                raise UserError(machine.error)
        if len(answers) >= machines:
            return [url for machine in answers for url in machine.urls]
        if monotonic() > deadline:
            raise UserError(
                f"the servers of {len(answers)} of features.nodes={machines} machines answer {COMING:g} s after the trainers "
                "asked; look at those machines' output"
            )
        sleep(LOOK)


def _beat(folder: Path, request: str, served: ServedStates, closing: threading.Event) -> None:
    beat = 0
    while True:
        with suppress(OSError):  # a full disk: the machines wait for a long time
            _write(folder / WANTED, asdict(Wanted(request, beat, served)))
        beat += 1
        if closing.wait(BEAT):
            return


def _own(folder: Path) -> Path:
    return folder / MACHINE.replace("*", os.environ.get("SLURMD_NODENAME") or HOST)


def _machine(content: dict[str, Any]) -> Machine:
    return Machine(content["id"], tuple(content["urls"]), content["error"])


def _write(file: Path, content: dict[str, Any]) -> None:
    """Replace the file at once. It is not fsynced: nothing needs it after a crash."""
    temporary_file = file.with_name(f"{file.name}.tmp-{HOST}-{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary_file.write_text(json.dumps(content), encoding="utf-8")
    temporary_file.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    reads = 0
    while True:
        reads += 1
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return content
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE or reads == READS:
                raise
