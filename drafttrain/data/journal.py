"""What has been answered so far, safe against a kill at any moment: a line per text, appended by one process to its own file.

A line counts once its line feed is there, and while its checksum is that of the rest of it. A torn end of a file is ignored
by readers and cut off by the process that goes on with the file. A damaged line before others is left out, and said. Texts that
are not there are asked again. The files of all processes, of earlier runs too, are read together, so that a run may go on in
another number of processes.

Lines without a checksum count as they are: earlier versions wrote such, and whoever changes one on purpose removes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.files import read_sealed_json, remove_abandoned, sealed, unsealed, write_sealed_json

FILES = "rank-*.jsonl"
SETTINGS = "settings.json"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems that have none: nothing else needs them
SYNC = 5.0  # seconds of work that a power failure may cost; a kill costs none


class Journal:
    """One process's file, open for appending. Raises UserError while another process has it open."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILES.replace("*", f"{rank:05}")
        self._file = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{path} is being written by another process; wait for it, or name another out=") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        self._file.truncate(whole_bytes(path))
        self._synced = time.monotonic()

    def append(self, record: dict[str, Any]) -> None:
        """In one write, straight to the system."""
        line = memoryview(json.dumps(sealed(record), ensure_ascii=False).encode() + b"\n")
        while line:
            line = line[self._file.write(line) :]
        if time.monotonic() - self._synced > SYNC:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


@dataclass(frozen=True, slots=True)
class Found:
    """What is in a folder. answered: ids of the texts that are there; one that failed is not. damaged: `file:line` of each line
    that is left out though others follow it.
    """

    answered: set[str]
    damaged: list[str]


def look(folder: Path) -> Found:
    found = Found(set(), [])
    for path in sorted(folder.glob(FILES)):
        bad: list[str] = []
        for number, (_, _, record) in enumerate(_lines(path), start=1):
            if record is None:
                bad.append(f"{path}:{number}")
                continue
            found.damaged.extend(bad)
            bad.clear()
            if "messages" in record:
                found.answered.add(record["id"])
    return found


def whole_bytes(path: Path) -> int:
    """The file's length without what a kill or a power failure has torn at its end."""
    return max((end for _, end, record in _lines(path) if record is not None), default=0)


def read(folder: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """(file, offset, record) of every whole line of every file."""
    for path in sorted(folder.glob(FILES)):
        yield from ((path, start, record) for start, _, record in _lines(path) if record is not None)


def answered(folder: Path) -> set[str]:
    """The ids of all texts that are there; one that failed is not."""
    return look(folder).answered


def _lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """(first byte, end, record) of every line; no record where it is torn or damaged."""
    with path.open("rb") as file:
        start = 0
        for line in file:
            yield start, start + len(line), record_of(line)
            start += len(line)


def record_of(line: bytes) -> dict[str, Any] | None:
    """A line's record; None of one that is torn or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # zeros, where a power failure came between a file's length and its bytes
        return None
    return unsealed(record) if isinstance(record, dict) else None


def check_settings(folder: Path, settings: dict[str, Any], write: bool) -> None:
    """Record what decides the texts, where it is not recorded yet and `write`.

    Raises UserError where the folder was begun with other settings: its texts would not go together with the new ones.
    """
    path = folder / SETTINGS
    if write:
        remove_abandoned(folder)
    if not path.exists():
        if write:
            write_sealed_json(path, settings)
        return
    before = _flat(read_sealed_json(path, "the settings of a journal", "name another out=, or remove the folder"))
    now = _flat(settings)
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{folder} was begun with {name} {json.dumps(before.get(name))}, now it is {json.dumps(now.get(name))} "
                f"(see {SETTINGS} there); repeat that, name another out=, or remove the folder"
            )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """{a: {b: 1}, c: 2} as {a.b: 1, c: 2}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": v for key, v in _flat(value).items()} if isinstance(value, dict) else {name: value}
    return flat
