"""Checksums of a checkpoint's files, and the newest checkpoint whose files are undamaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from drafttrain.core.checksums import file_sum, first_fault
from drafttrain.core.errors import UserError
from drafttrain.core.files import read_sealed_json, write_sealed_json
from drafttrain.drafters.checkpoint import WEIGHTS, list_checkpoints
from drafttrain.train.shards import PATTERN

SUMS = "checksums.json"
TENSORS = (WEIGHTS, PATTERN)  # files that training reads and users do not edit


def seal(directory: Path, sums: Mapping[str, str]) -> None:
    """Write the file of checksums: each file's sha256 by name, and a checksum of the whole. It is written last."""
    write_sealed_json(directory / SUMS, dict(sorted(sums.items())))


def file_sums(*files: Path) -> dict[str, str]:
    """Each file's sha256 by name. The files are flushed to disk first."""
    return {file.name: file_sum(file, durable=True) for file in files}


def damage(directory: Path) -> str | None:
    """A sentence on the first damaged file of a checkpoint; None if all files are as saved.

    Files that are written later, such as decode.json and golden drafts, have their own checksums.
    """
    try:
        sums = read_sealed_json(directory / SUMS, "checksums", "")
    except (OSError, UserError):
        return f"{SUMS} is missing or damaged"
    if unlisted := sorted({file.name for pattern in TENSORS for file in directory.glob(pattern)} - sums.keys()):
        return f"{unlisted[0]} is not in {SUMS}"
    return first_fault(directory, sums, SUMS)


def newest_valid(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint. Newer, damaged ones are renamed to `<name>.damaged`, with a line to `say` for each."""
    for path in reversed(list_checkpoints(folder)):
        if (problem := damage(path)) is None:
            return path
        damaged_path = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(damaged_path, ignore_errors=True)
        path.rename(damaged_path)
        say(f"checkpoint {path.name} is damaged and renamed to {damaged_path.name}: {problem}")
    return None
