"""Files in which vLLM leaves the states of a request: waited for, read, and removed.

vLLM's connector writes `<folder>/<request id>.safetensors` after it has answered the request. From the request's first step
until the file is whole it holds an exclusive lock (`flock`) on `<file>.lock`. It never deletes a file.

Shapes: T tokens, L layer ids, H hidden.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Event
from time import monotonic, time_ns

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from drafttrain.core.files import HOST, process_runs

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two looks at a lock
LOCK = ".lock"
NAMED = "drafttrain-"


class StateFileError(Exception):
    """A file of states is missing, damaged or late. Another request may give a good one."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """The contents of a file."""

    hidden_TLH: Tensor
    token_T: Tensor


class RequestNames:
    """Names of this process's requests. Servers name their files after them, so that every file tells whose it is."""

    def __init__(self) -> None:
        self.own = f"{NAMED}{HOST}-{os.getpid()}-{time_ns():x}-"
        self._numbers = count()

    def next(self) -> str:
        """A name that no other request has."""
        return f"{self.own}{next(self._numbers)}-"

    def abandoned(self, name: str) -> bool:
        """Whether a file belongs to a process of this machine that has ended."""
        found = re.search(rf"{NAMED}{re.escape(HOST)}-(\d+)-[0-9a-f]+-", name)
        if found is None or found[0] == self.own:
            return False
        return int(found[1]) == os.getpid() or not process_runs(int(found[1]))


def read(path: Path, deadline: float, closed: Event) -> StateFile:
    """Wait until the file is whole, read it and remove it. deadline: of `monotonic`. closed: ends the wait.

    Raises StateFileError for a file that is missing, damaged or late.
    """
    _wait(path, deadline, closed)
    try:
        content = load(path.read_bytes())  # not mapped: a server may truncate the file
        return StateFile(content["hidden_states"], content["token_ids"])
    except OSError as error:
        raise StateFileError(f"no readable {path} ({error.strerror})") from error
    except (SafetensorError, KeyError, ValueError) as error:
        raise StateFileError(f"{path} is damaged ({error})") from error
    finally:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file of states and its lock, where they are."""
    for one in (path, path.with_name(path.name + LOCK)):
        one.unlink(missing_ok=True)


def remove_named(folder: Path, names: Iterable[str]) -> None:
    """Remove the files of the requests of these names; a name may be the beginning of one."""
    wanted = tuple(names)
    for file in _files(folder):
        if any(name in file.name for name in wanted):
            file.unlink(missing_ok=True)


def remove_abandoned(folder: Path, names: RequestNames) -> None:
    """Remove the files that killed processes of this machine have left in a folder."""
    for file in _files(folder):
        if names.abandoned(file.name):
            file.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.glob(f"*{NAMED}*") if not file.is_dir()]


def _wait(path: Path, deadline: float, closed: Event) -> None:
    """Wait until the server holds no lock on the file. A killed server holds none: the system takes it back."""
    try:
        lock = os.open(path.with_name(path.name + LOCK), os.O_RDONLY)
    except OSError as error:
        raise StateFileError(
            f"{path}{LOCK} cannot be read ({error.strerror}); features.dir names the folder in which this machine sees the "
            "server's files"
        ) from error
    try:
        pause = SHORTEST_PAUSE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if monotonic() >= deadline or closed.is_set():
                    remove(path)
                    raise StateFileError(f"{path} was not written in time") from None
            closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    finally:
        os.close(lock)
