"""Opens the data that `data.path` and `data.mix` name: the embedded data, files, glob patterns, folders and hub ids."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions, SourceOptions
from drafttrain.data.files import ASSETS, LINES, TABLES, check_file, path_of, reason_of
from drafttrain.data.forms import ASSISTANT, Conversation, check_form, conversation
from drafttrain.data.provenance import shards_of
from drafttrain.data.records import Joined, Listed, Loaded, Records, open_records

__all__ = ["ASSISTANT", "Conversation", "Source", "cache_folder", "open_sources", "read_conversations"]

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """One source of the data."""

    name: str
    records: Records
    form: str  # a name of `forms.FORMS`, or auto
    weight: float | None  # share of an epoch relative to other sources; None: every record counts once

    def conversation(self, number: int, replies: bool = True) -> Conversation:
        """The record with this number, from 0. Raises UserError that names the record's place."""
        origin, record = self.records[number]
        return conversation(origin, record, self.form, replies, self.records.folder(number))


def open_sources(options: DataOptions) -> list[Source]:
    """All sources that the options name, in order. Raises UserError for a source that is missing or has no readable records."""
    chosen = _chosen(options)
    weights = [source.weight for source in chosen]
    if any(w is None for w in weights) != all(w is None for w in weights):
        raise UserError("data.mix: some sources have a weight and others have none; give one to all, or to none")
    if any(w is not None and not 0 < w < float("inf") for w in weights):
        raise UserError(f"data.mix: expected weights above 0, got {', '.join(map(str, weights))}; leave a source out instead")
    spool = cache_folder(options) / "spool"
    return [Source(source.path, _open(source, spool), source.form, source.weight) for source in chosen]


def read_conversations(options: DataOptions, replies: bool = True) -> list[Conversation]:
    """All conversations, in order. Raises UserError that names the place of an unusable record.

    replies: refuse conversations without an assistant turn. Those are only usable as prompts.
    """
    return [source.conversation(i, replies) for source in open_sources(options) for i in range(len(source.records))]


def cache_folder(options: DataOptions) -> Path:
    """The folder of prepared data."""
    if options.cache is not None:
        return Path(options.cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafttrain" / "data"


def _chosen(options: DataOptions) -> list[SourceOptions]:
    if options.mix and options.path != "embedded":
        raise UserError(f"data.path={options.path} and data.mix both name the data; move the path into data.mix")
    alone = SourceOptions(**{f.name: getattr(options, f.name) for f in fields(SourceOptions) if f.name != "weight"})
    if options.mix and (strays := [f.name for f in fields(alone) if getattr(alone, f.name) != f.default]):
        raise UserError(f"data.{strays[0]} is for data.path alone; give each source of data.mix its own {strays[0]}")
    chosen = list(options.mix) or [alone]
    for source in chosen:
        check_form(source.form)
        if source.limit is not None and source.limit < 1:
            raise UserError(f"data.limit must be at least 1, got {source.limit}; raise it, or leave it out to read everything")
    return chosen


def _open(source: SourceOptions, spool: Path) -> Records:
    if source.path == "embedded":
        return open_records(ASSETS / "train.jsonl.gz", source.limit, spool)
    path = path_of(source.path, "data.path")
    if not _is_local(path):
        return _hub(source)
    return _joined(_files(source, path), source.limit, spool)


def _is_local(path: Path) -> bool:
    """Whether this is a path rather than a hub id: it exists, has a data file's suffix, or is not a possible hub id."""
    return path.exists() or path.name.endswith(LINES + TABLES) or not HUB_ID.fullmatch(str(path))


def _joined(files: Sequence[Path], limit: int | None, spool: Path) -> Records:
    parts: list[Records] = []
    for file in files:
        check_file(file)
        parts.append(open_records(file, limit, spool))
        if limit is not None and (limit := limit - len(parts[-1])) == 0:
            break
    return parts[0] if len(parts) == 1 else Joined(parts)


def _files(source: SourceOptions, path: Path) -> list[Path]:
    if path.is_dir():
        return list(_folder_files(source, path))
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if name.endswith(LINES + TABLES)]
    if not found:
        raise UserError(f"data.path={source.path}: expected {', '.join(LINES + TABLES)} files, got none; correct the pattern")
    return found


def _folder_files(source: SourceOptions, folder: Path) -> Iterator[Path]:
    """The files that `prepare` wrote; else those of a split by the hub's rules: from the data set's card or from file names."""
    from datasets import load_dataset_builder  # slow to import

    if shards := shards_of(folder):
        yield from shards
        return
    if (script := folder / f"{folder.resolve().name}.py").is_file():
        raise UserError(
            f"data.path={source.path}: it holds the loading script {script.name}, which is not run; name the data files "
            f"instead, such as data.path={source.path}/*.jsonl, or save what the script gives as JSON lines or Parquet"
        )
    try:
        by_split = load_dataset_builder(str(folder), name=source.config).config.data_files or {}
    except Exception as error:  # the library and its parsers raise errors of every kind
        raise UserError(f"data.path={source.path}: {reason_of(error)}; correct data.path, data.config or its files") from error
    if source.split not in by_split:
        splits = ", ".join(map(str, by_split)) or "none"
        raise UserError(
            f"data.path={source.path}: it has no split '{source.split}' but {splits}; set data.split to one of them"
        )
    files = [Path(name) for name in by_split[source.split]]
    # a .json file next to other data files describes them
    others = [file for file in files if not file.name.endswith((".json", ".json.gz"))]
    yield from others or files


def _hub(source: SourceOptions) -> Records:
    from datasets import load_dataset  # slow to import

    try:
        # a limited read streams, so that a few records of a large set do not download it
        streamed = source.limit is not None
        rows: Any = load_dataset(source.path, name=source.config, split=source.split, streaming=streamed)
        return Listed(source.path, islice(rows, source.limit)) if streamed else Loaded(source.path, rows)
    except UserError:
        raise
    except Exception as error:  # the library and its parsers raise errors of every kind
        config = f" of '{source.config}'" if source.config else ""
        raise UserError(
            f"data.path={source.path}: no local file of this name, and no data set with split '{source.split}'{config} "
            f"from the hub ({reason_of(error)}); correct data.path, data.config or data.split, or download the set and name "
            "its folder"
        ) from error
