"""A journal of generated texts that survives a kill at any moment: one line per text, appended by each process to its own file.

A line counts if it ends with a line feed and its checksum is correct. Readers ignore a torn end of a file, and the process that
continues the file cuts it off. A damaged line before others is skipped and reported. Missing texts are generated again. The
files of all processes and of earlier runs are read together, so that a run may continue with another number of processes.

Lines without a checksum are accepted: earlier versions wrote them, and a user who edits a line removes its checksum.
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
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks, where the journal works as well
SYNC = 5.0  # seconds of work that a power failure may lose; a kill loses none
PATIENCE = 5.0  # seconds to wait for a file that another process has open: a killed process ends a moment after its launcher


class Journal:
    """One process's file, open for appending. Raises UserError if another process keeps it open for `PATIENCE`."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILES.replace("*", f"{rank:05}")
        self._file = path.open("ab", buffering=0)
        self._lock(path)
        self._file.truncate(whole_bytes(path))
        self._synced = time.monotonic()

    def _lock(self, path: Path) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise UserError(f"{path} is being written by another process; wait for it, or name another out=") from error
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                return None
            time.sleep(0.05)

    def append(self, record: dict[str, Any]) -> None:
        """Write a record in one write, without buffering."""
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
class JournalContents:
    """The contents of a folder."""

    answered: set[str]  # ids of the texts that succeeded
    damaged: list[str]  # `file:line` of each damaged line that others follow


def scan(folder: Path) -> JournalContents:
    """Read all files of a folder."""
    contents = JournalContents(set(), [])
    for path in sorted(folder.glob(FILES)):
        damaged_lines: list[str] = []
        for line_number, (_, _, record) in enumerate(_lines(path), start=1):
            if record is None:
                damaged_lines.append(f"{path}:{line_number}")
                continue
            contents.damaged.extend(damaged_lines)
            damaged_lines.clear()
            if "messages" in record:
                contents.answered.add(record["id"])
    return contents


def whole_bytes(path: Path) -> int:
    """The file's length without an end that was torn by a kill or a power failure."""
    return max((end for _, end, record in _lines(path) if record is not None), default=0)


def read(folder: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """(file, offset, record) of every complete line of every file."""
    for path in sorted(folder.glob(FILES)):
        yield from ((path, start, record) for start, _, record in _lines(path) if record is not None)


def _lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """(first byte, end, record) of every line. The record is None where the line is torn or damaged."""
    with path.open("rb") as file:
        start = 0
        for line in file:
            yield start, start + len(line), record_of(line)
            start += len(line)


def record_of(line: bytes) -> dict[str, Any] | None:
    """A line's record; None if the line is torn or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # such as zeros, after a power failure between a file's length and its bytes
        return None
    return unsealed(record) if isinstance(record, dict) else None


def check_settings(folder: Path, settings: dict[str, Any], write: bool) -> None:
    """Record the settings that decide the texts, if they are not recorded yet and `write` is set.

    Raises UserError if the folder was begun with other settings, whose texts would not match new ones.
    """
    path = folder / SETTINGS
    if write:
        remove_abandoned(folder)
    if not path.exists():
        if write:
            write_sealed_json(path, settings)
        return
    recorded = _flat(read_sealed_json(path, "the settings of a journal", "name another out=, or remove the folder"))
    current = _flat(settings)
    for name in sorted(recorded):  # those of an earlier version may be fewer
        if recorded.get(name) != current.get(name):
            raise UserError(
                f"{folder} was begun with {name} {json.dumps(recorded.get(name))}, now it is {json.dumps(current.get(name))} "
                f"(see {SETTINGS} there); repeat that, name another out=, or remove the folder"
            )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """{a: {b: 1}, c: 2} as {a.b: 1, c: 2}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": v for key, v in _flat(value).items()} if isinstance(value, dict) else {name: value}
    return flat
