"""A list of the sha256 checksums of a directory's files, written into the directory and checked by every reader.

A directory without that list is accepted unchecked: another program or an earlier version made it, or it was changed on
purpose.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.files import read_sealed_json, sealed

LISTED = "drafttrain-checksums.json"
SUM = re.compile("[0-9a-f]{64}")


def file_sum(file: Path, durable: bool = False) -> str:
    """The file's sha256. durable: fsync the file first."""
    with file.open("rb") as stream:
        if durable:
            os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()


def first_fault(directory: Path, sums: Mapping[str, Any], where: str) -> str | None:
    """Describe the first missing or damaged file; None if all are intact. where: name of the list, for the message."""
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        return next(filter(None, pool.map(lambda name: _fault(directory, name, sums[name], where), sums)), None)


def _fault(directory: Path, name: str, expected: Any, list_name: str) -> str | None:
    try:
        digest = file_sum(directory / name)
    except (OSError, ValueError) as error:
        return f"{name}, which {list_name} lists, cannot be read ({getattr(error, 'strerror', error)})"
    return None if digest == expected else f"{name} is damaged or cut off: its sha256 is not that in {list_name}"


def list_files(directory: Path, without: Collection[str] = ()) -> None:
    """Write the list of all files in this directory and below; directories inside that have a list themselves are left out.

    Call it last, before the directory appears (`atomic_directory`). without: names of files that people edit.
    """
    listed_directories = [path.parent for path in directory.rglob(LISTED) if path.parent != directory]
    files = [path for path in directory.rglob("*") if path.is_file() and path.name not in (*without, LISTED)]
    sums = {
        path.relative_to(directory).as_posix(): file_sum(path)
        for path in files
        if not set(listed_directories) & {*path.parents}
    }
    text = json.dumps(sealed(dict(sorted(sums.items()))), indent=2)
    (directory / LISTED).write_text(f"{text}\n", encoding="utf-8")


def listed(directory: Path, way_out: str) -> dict[str, Any] | None:
    """The sha256 of each file name; None where the directory has no list. Raises UserError for a damaged list."""
    file = directory / LISTED
    if not file.is_file():
        return None
    sums = read_sealed_json(file, "checksums", way_out)
    invalid_names = [name for name, value in sums.items() if not (isinstance(value, str) and SUM.fullmatch(value))]
    if invalid_names:
        raise UserError(f"{file}: expected checksums, got something else ({invalid_names[0]!r:.60}); {way_out}")
    return sums


def check_listed(directory: Path, way_out: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Raise UserError unless the listed files are unchanged. wanted: selects the names to check."""
    sums = listed(directory, way_out) or {}
    if (fault := first_fault(directory, {name: sums[name] for name in sums if wanted(name)}, LISTED)) is not None:
        raise UserError(changed(directory, fault, way_out))


def changed(directory: Path, fault: str, way_out: str) -> str:
    """The message for a directory whose files differ from its list."""
    return f"{directory}: {fault}; {way_out}. If you changed it on purpose, delete {LISTED} there"
