"""Which checkpoints training can go on from: those whose files are, byte by byte, what was saved."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drafttrain.atomic import read_sealed_json, write_sealed_json
from drafttrain.checkpoint import WEIGHTS, list_checkpoints
from drafttrain.errors import UserError
from drafttrain.train.shards import PATTERN

SUMS = "checksums.json"
TENSORS = (WEIGHTS, PATTERN)  # files that training reads and that nobody edits


def seal(directory: Path, sums: Mapping[str, str]) -> None:
    """Write down each file's sha256 by its name, with a checksum of them all: a checkpoint's last file."""
    write_sealed_json(directory / SUMS, dict(sorted(sums.items())))


def file_sums(*files: Path) -> dict[str, str]:
    """Each file's sha256 by its name. They are on the disk when this returns."""
    return {file.name: _sum(file, durable=True) for file in files}


def _sum(file: Path, durable: bool = False) -> str:
    with file.open("rb") as opened:
        if durable:
            os.fsync(opened.fileno())
        return hashlib.file_digest(opened, "sha256").hexdigest()


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint: its first bad file by name. None: nothing.

    What is written into a checkpoint later, such as decode.json and golden drafts, has a checksum of its own.
    """
    try:
        sums = read_sealed_json(directory / SUMS, "checksums", "")
    except (OSError, UserError):
        return f"{SUMS} is missing or damaged"
    if unlisted := sorted({file.name for pattern in TENSORS for file in directory.glob(pattern)} - sums.keys()):
        return f"{unlisted[0]} is not in {SUMS}"
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        return next(filter(None, pool.map(lambda name: _file_damage(directory / name, sums[name]), sums)), None)


def _file_damage(file: Path, expected: object) -> str | None:
    try:
        got = _sum(file)
    except OSError as error:
        return f"{file.name}, which {SUMS} lists, cannot be read ({error.strerror})"
    return None if got == expected else f"{file.name} is damaged or cut off: its sha256 is not that in {SUMS}"


def newest_valid(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The last whole checkpoint. Damaged ones above it step aside as `<name>.damaged`, with a line to `say` for each."""
    for path in reversed(list_checkpoints(folder)):
        if (found := damage(path)) is None:
            return path
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        say(f"checkpoint {path.name} is skipped, and kept as {aside.name}: {found}")
    return None
