"""Random access to records: an index over files, so that any process can read records in any order.

Files that cannot be read from the middle (compressed lines, a JSON array, Parquet, CSV) are converted once to plain lines or to
an Arrow file if they are large, and kept in memory if they are small.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_file, atomic_write_bytes
from drafttrain.data.files import (
    TABLES,
    as_object,
    check_file,
    damaged_gzip,
    filled_lines,
    is_array,
    open_plain,
    plain_rows,
    read_array,
    read_batches,
    read_json,
    unreadable,
)
from drafttrain.data.provenance import check_shard

SMALL = 2**23  # bytes; files up to this size are kept in memory
NO_ROOM = "free some space, or set data.cache to a folder on another disk"


class Records(Protocol):
    """Records by number. Workers get them by pickle."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> tuple[str, dict[str, Any]]:
        """(origin, record). The origin is the record's place, for messages."""
        ...

    @property
    def digest(self) -> str: ...

    def folder(self, number: int) -> Path | None:
        """The folder of the record's file; None: it is in no file."""
        ...


class Lines:
    """Lines of JSON in a file or in memory.

    starts: the first byte of each record, and the end of the last. label: prefix of a record's number in messages, as in
    `a.jsonl:3` or `a.json:record 3`.
    """

    def __init__(self, name: Path, content: Path | bytes, starts: array[int], label: str, digest: str | None = None) -> None:
        self.name, self.content, self.starts, self.label, self._digest = name, content, starts, label, digest
        self._mapped: mmap.mmap | bytes | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> tuple[str, dict[str, Any]]:
        line = self._bytes()[self.starts[number] : self.starts[number + 1]]
        origin = f"{self.name}:{self.label}{number + 1}"
        return origin, as_object(origin, read_json(line.rstrip(), self.name, number + 1))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}

    def folder(self, number: int) -> Path | None:
        return self.name.parent

    @property
    def digest(self) -> str:
        if self._digest is None:
            self._digest = digest_of(self.content)
        return f"{self._digest}:{len(self)}"

    def _bytes(self) -> mmap.mmap | bytes:
        if isinstance(self.content, bytes):
            return self.content
        if self._mapped is None:
            with self.content.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._mapped


class TableRows:
    """Rows of an Arrow table, memory-mapped from a file or in memory.

    content: an Arrow file or stream, or another kind of table that is small enough to be read at once.
    """

    def __init__(self, name: Path, content: Path, limit: int | None, digest: str | None = None) -> None:
        self.name, self.content, self.limit, self._digest = name, content, limit, digest
        self._batches: list[Any] = []
        self._ends: list[int] = []
        self._open()

    def __len__(self) -> int:
        return self._ends[-1] if self.limit is None else min(self.limit, self._ends[-1])

    def __getitem__(self, number: int) -> tuple[str, dict[str, Any]]:
        self._open()
        index = bisect_right(self._ends, number)
        row = plain_rows(self.name, self._batches[index].slice(number - (self._ends[index - 1] if index else 0), 1))[0]
        return f"{self.name}:row {number + 1}", filled(row)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": []}

    def folder(self, number: int) -> Path | None:
        return self.name.parent

    @property
    def digest(self) -> str:
        if self._digest is None:
            self._digest = digest_of(self.content)
        return f"{self._digest}:{len(self)}"

    def _open(self) -> None:
        if not self._batches:
            self._batches = list(read_batches(self.content))
            self._ends = list(accumulate(batch.num_rows for batch in self._batches)) or [0]


class Loaded:
    """Rows of a `datasets.Dataset`, which maps them from its own cache."""

    def __init__(self, name: str, rows: Any) -> None:
        self.name, self.rows = name, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[str, dict[str, Any]]:
        return f"{self.name}:row {number + 1}", filled(self.rows[number])

    @property
    def digest(self) -> str:
        return str(self.rows._fingerprint)

    def folder(self, number: int) -> Path | None:
        return None


class Listed:
    """A few records in memory."""

    def __init__(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        self.name, self.rows = name, [filled(dict(row)) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[str, dict[str, Any]]:
        return f"{self.name}:row {number + 1}", self.rows[number]

    @property
    def digest(self) -> str:
        return digest_of(json.dumps(self.rows, default=str).encode())

    def folder(self, number: int) -> Path | None:
        return None


class JoinedRecords:
    """Several `Records`, one after another."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self.parts, self.ends = list(parts), list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: int) -> tuple[str, dict[str, Any]]:
        part_index, record_index = self._place(number)
        return self.parts[part_index][record_index]

    def _place(self, index: int) -> tuple[int, int]:
        """(part, number in it)."""
        part_index = bisect_right(self.ends, index)
        return part_index, index - (self.ends[part_index - 1] if part_index else 0)

    @property
    def digest(self) -> str:
        return digest_of("\n".join(records.digest for records in self.parts).encode())

    def folder(self, number: int) -> Path | None:
        part_index, record_index = self._place(number)
        return self.parts[part_index].folder(record_index)


def filled(value: Any) -> Any:
    """The value without nulls. Tables store null in fields that a record does not have."""
    if isinstance(value, dict):
        return {key: filled(inner) for key, inner in value.items() if inner is not None}
    return [filled(inner) for inner in value] if isinstance(value, list) else value


def open_records(path: Path, limit: int | None, spool: Path) -> Records:
    """The records of a data file, at most `limit`. spool: folder for large files that must be converted.

    Raises UserError that names the place of a blank line, for an empty or damaged file, and for a changed file of `prepare`.
    """
    with unreadable(path):
        digest = check_shard(path)
        records = _rows(path, limit, spool, digest) if path.name.endswith(TABLES) else _lines(path, limit, spool, digest)
    if not len(records):
        raise UserError(f"{path}: expected at least one record, got an empty file; fill it, or point to another file")
    return records


def read_records(path: Path, limit: int | None, spool: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (origin, record) pairs in order, at most `limit`. Raises UserError as `open_records`, or for an unknown file."""
    check_file(path)
    records = open_records(path, limit, spool)
    with unreadable(path):
        yield from (records[index] for index in range(len(records)))


def _rows(path: Path, limit: int | None, spool: Path, digest: str | None) -> Records:
    if path.suffix == ".arrow" or path.stat().st_size <= SMALL:
        return TableRows(path, path, limit, digest)
    arrow_path, digest = _spooled(path, spool, ".arrow", lambda file: _write_arrow(path, file), digest)
    return TableRows(path, arrow_path, limit, digest)


def _lines(path: Path, limit: int | None, spool: Path, digest: str | None) -> Records:
    is_json_array = is_array(path)
    label = "record " if is_json_array else ""
    with damaged_gzip(path):
        if path.suffix != ".gz" and not is_json_array:
            content: Path | bytes = path
        elif path.stat().st_size <= SMALL:
            content, digest = b"".join(_plain(path, is_json_array)), None
        else:
            content, digest = _spooled(path, spool, ".jsonl", lambda file: file.writelines(_plain(path, is_json_array)), digest)
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        return Lines(path, content, _starts(path, file, limit), label, digest)


def _plain(path: Path, is_json_array: bool) -> Iterator[bytes]:
    """The file as lines of JSON."""
    if is_json_array:
        yield from (_dumped(path, number, record) for number, record in enumerate(read_array(path), start=1))
    else:
        with open_plain(path) as file:
            yield from file


def _dumped(path: Path, number: int, record: Any) -> bytes:
    try:
        return json.dumps(record).encode() + b"\n"
    except RecursionError as error:
        raise UserError(f"{path}:record {number}: expected a record, got JSON nested too deeply to read; flatten it") from error


def _starts(path: Path, lines: Iterable[bytes], limit: int | None) -> array[int]:
    """The first byte of each record, and the end of the last."""
    starts = array("q", [0])
    for _, line in islice(filled_lines(path, lines), limit):
        starts.append(starts[-1] + len(line))
    return starts


def _spooled(path: Path, spool: Path, suffix: str, write: Callable[[BinaryIO], Any], digest: str | None) -> tuple[Path, str]:
    """(the converted file, its sha256). Converts only if the file is missing or damaged. digest: that of `path`, in
    its name.
    """
    converted = spool / f"{digest or digest_of(path)}{suffix}"
    checksum = converted.with_name(f"{converted.name}.sha256")
    if (
        converted.exists()
        and checksum.exists()
        and (converted_digest := digest_of(converted)) == checksum.read_text(encoding="ascii", errors="replace")
    ):
        return converted, converted_digest
    with atomic_file(converted, NO_ROOM) as file:
        write(file)
        file.flush()
        converted_digest = digest_of(Path(file.name))
        atomic_write_bytes(checksum, converted_digest.encode(), NO_ROOM)
    return converted, converted_digest


def _write_arrow(path: Path, file: BinaryIO) -> None:
    from pyarrow import ipc

    batches = iter(read_batches(path))
    first_batch = next(batches)
    with ipc.new_stream(file, first_batch.schema) as writer:
        writer.write_batch(first_batch)
        for batch in batches:
            writer.write_batch(batch)


def digest_of(content: Path | bytes) -> str:
    """sha256 of a file or of bytes."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
