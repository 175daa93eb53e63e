"""Data sets of the hub: the files of one split, downloaded to the hub's cache, or so many of its records as a limit says.

What was read once is found again without the network: `hub/` in the cache of prepared data keeps the list of a split's files,
and limited reads as JSON lines. A list belongs to one commit, so a new commit is noticed wherever the hub can be reached.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError, data_set_reason, hub_reason, without_token
from drafttrain.core.files import atomic_file, atomic_write_bytes
from drafttrain.data import SourceOptions
from drafttrain.data.files import LINES, TABLES, reason_of
from drafttrain.data.records import NO_ROOM, JoinedRecords, Listed, Loaded, Records, open_records

PLACE = re.compile(r"hf://datasets/(?P<name>[\w.-]+(/[\w.-]+)?)@(?P<commit>[0-9a-f]{40})/(?P<file>.+)")
SLICED = re.compile(r"[\[+]")  # of a split: a part of it, or several, which `datasets` reads
STREAMED = (".parquet", ".jsonl", ".jsonl.gz", ".csv")  # a .json file may be one array, which must be read whole


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The files of a split at one commit. files: their paths in the repository; empty: only `datasets` can read them."""

    name: str
    commit: str
    files: tuple[str, ...]


def open_hub(source: SourceOptions, cache: Path) -> tuple[Records, str | None]:
    """The records of a data set of the hub, and their commit, None where only `datasets` knows it.

    cache: folder of prepared data. Raises UserError that says in one line why the hub does not give the set.
    """
    folder, spool = cache / "hub", cache / "spool"
    try:
        split_files = _listed(source, folder)
        downloads_files = source.limit is None or (split_files.files and not split_files.files[0].endswith(STREAMED))
        records = _whole(source, split_files, spool) if downloads_files else _limited(source, split_files, folder, spool)
        return records, split_files.commit if split_files.files else None
    except UserError:
        raise
    except Exception as error:  # the libraries and their parsers raise errors of every kind
        raise _refused(source, error) from error


class Fetched:
    """Records of downloaded files. Their origins begin with the data set's id instead of the cache's folder."""

    def __init__(self, records: Records, folder: Path, name: str) -> None:
        self.records, self._folder, self.name = records, str(folder), name

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[str, dict[str, Any]]:
        origin, record = self.records[number]
        return origin.replace(self._folder, self.name), record

    @property
    def digest(self) -> str:
        return self.records.digest

    def folder(self, number: int) -> Path | None:
        return self.records.folder(number)


def _listed(source: SourceOptions, folder: Path) -> SplitFiles:
    """The split's files, from the hub; where it cannot be reached, as they were when it was read last."""
    record = folder / f"{_key(source)}.json"
    try:
        split_files = _ask(source)
    except UserError:
        raise
    except Exception as error:
        if record.is_file() and _unreachable(source, error):
            return _read(record)
        raise
    if split_files is None:
        return _read(record) if record.is_file() else SplitFiles(source.path, "", ())
    if split_files.files:
        content = {"name": split_files.name, "commit": split_files.commit, "files": list(split_files.files)}
        atomic_write_bytes(record, json.dumps(content, indent=2).encode(), NO_ROOM)
    return split_files


def _ask(source: SourceOptions) -> SplitFiles | None:
    """The split's files; None where the hub is away and `datasets` has the set in its own cache, of whatever commit."""
    from datasets import load_dataset_builder  # slow to import

    builder = load_dataset_builder(source.path, name=source.config, data_files=source.files, revision=source.revision)
    by_split = builder.config.data_files or {}
    split = "train" if source.files else source.split
    if SLICED.search(split):
        return SplitFiles(source.path, str(builder.hash or ""), ())
    if not by_split:
        return None
    if split not in by_split:
        splits = ", ".join(map(str, by_split))
        raise UserError(f"data.path={source.path}: it has no split '{split}' but {splits}; set data.split to one of them")
    matches = [PLACE.fullmatch(str(name)) for name in by_split.get(split, ())]
    files = [(match["name"], match["commit"], match["file"]) for match in matches if match is not None]
    if len(files) < len(matches) or not files or not all(file.endswith(LINES + TABLES) for _, _, file in files):
        return SplitFiles(source.path, str(builder.hash or ""), ())
    return SplitFiles(files[0][0], files[0][1], tuple(file for _, _, file in files))


def _read(record: Path) -> SplitFiles:
    content = json.loads(record.read_text(encoding="utf-8"))
    return SplitFiles(content["name"], content["commit"], tuple(content["files"]))


def _whole(source: SourceOptions, split_files: SplitFiles, spool: Path) -> Records:
    """All records, or the first ones: files are downloaded in order, and no more than the limit needs."""
    from huggingface_hub import hf_hub_download

    if not split_files.files:
        return _loaded(source)
    file_records: list[Records] = []
    remaining, root = source.limit, ""
    for file in split_files.files:
        path = hf_hub_download(split_files.name, file, repo_type="dataset", revision=split_files.commit)
        root = path.removesuffix(f"/{file}")
        file_records.append(open_records(Path(path), remaining, spool))
        if remaining is not None and (remaining := remaining - len(file_records[-1])) == 0:
            break
    return Fetched(file_records[0] if len(file_records) == 1 else JoinedRecords(file_records), Path(root), split_files.name)


def _loaded(source: SourceOptions) -> Records:
    """Files of kinds that only `datasets` reads."""
    from datasets import load_dataset

    rows: Any = load_dataset(source.path, **_asked(source, source.revision))
    return Loaded(source.path, rows)


def _limited(source: SourceOptions, split_files: SplitFiles, folder: Path, spool: Path) -> Records:
    """The first records, streamed once and kept as JSON lines. Records with values that JSON lacks are kept in memory."""
    cache_file = folder / f"{_key(source)}-{split_files.commit[:12] or 'unknown'}-{source.limit}.jsonl"
    with _alone(cache_file):
        if not cache_file.is_file():
            from datasets import load_dataset  # slow to import

            rows: Any = load_dataset(
                source.path, streaming=True, **_asked(source, split_files.commit if split_files.files else source.revision)
            )
            streamed = Listed(source.path, islice(rows, source.limit))
            try:
                lines = b"".join(json.dumps(row).encode() + b"\n" for row in streamed.rows)
            except (TypeError, ValueError):  # such as bytes of images
                return streamed
            if not lines:
                raise UserError(f"data.path={source.path}: split '{source.split}' has no record; set data.split to another one")
            with atomic_file(cache_file, NO_ROOM) as file:
                file.write(lines)
    return _Rows(open_records(cache_file, None, spool), source.path)


class _Rows:
    """Records under their number in the data set: `NAME:row 3`."""

    def __init__(self, records: Records, name: str) -> None:
        self.records, self.name = records, name

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[str, dict[str, Any]]:
        return f"{self.name}:row {number + 1}", self.records[number][1]

    @property
    def digest(self) -> str:
        return self.records.digest

    def folder(self, number: int) -> Path | None:
        return None


def _asked(source: SourceOptions, revision: str | None) -> dict[str, Any]:
    """Arguments of `load_dataset`."""
    split = "train" if source.files else source.split
    return {"name": source.config, "split": split, "data_files": source.files, "revision": revision}


def _key(source: SourceOptions) -> str:
    key_fields = [source.path, source.config, source.split, source.files, source.revision]
    return hashlib.sha256(json.dumps(key_fields).encode()).hexdigest()[:24]


def _unreachable(source: SourceOptions, error: Exception) -> bool:
    """Whether there is no answer of the hub, as opposed to one that refuses."""
    reason = hub_reason(error, source.path, "dataset", source.revision) or ""
    return reason.startswith(("HF_HUB_OFFLINE", "the connection"))


def _refused(source: SourceOptions, error: Exception) -> UserError:
    if (reason := data_set_reason(error, source.path, source.revision)) is not None:
        return UserError(f"data.path={source.path}: no local file of this name, and {reason}")
    config = f" of '{source.config}'" if source.config else ""
    return UserError(
        f"data.path={source.path}: no local file of this name, and no data set with split '{source.split}'{config} "
        f"from the hub ({without_token(reason_of(error))}); correct data.path, data.config or data.split, or download the set "
        "and name its folder"
    )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of a machine at a time: the first reads from the network, the others find its file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
