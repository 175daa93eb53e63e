"""A set of features on disk: safetensors shards, written atomically, with their expected sizes and checksums.

<folder>/index.json              for people only: what the features belong to, what the folder's name is a hash of, and sizes
<folder>/shard-00000.safetensors the columns of `FeatureFormat`, [N, ...] each
<folder>/shard-00000.json        size and sha256, written after the shard: a shard without this file counts as absent
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_bytes, atomic_write_json, remove_leftovers
from drafttrain.features.format import FeatureFormat
from drafttrain.features.layout import RowPlace, ShardLayout

VERSION = 1  # of the layout too
ABSENT = "absent"
MAX_MAPPED = 64  # shards that stay mapped
FULL = "complete shards are kept, and the same command continues after them; free space, or set features.dir to another disk"


@dataclass(frozen=True, slots=True)
class Record:
    """Expected size and checksum of a shard's file."""

    bytes: int
    sha256: str


class FeatureStore:
    """The features of `layout` in `form`, in a folder below `root` that is named by a hash of all that decides their values.

    description: other facts that decide them, such as the target's fingerprint.
    """

    def __init__(self, root: Path, layout: ShardLayout, form: FeatureFormat, description: Mapping[str, Any]) -> None:
        self.layout, self.form = layout, form
        self.identity = {"version": VERSION, **description, "form": asdict(form), "texts": layout.digest}
        name = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = root / name
        self._mapped: OrderedDict[int, Any] = OrderedDict()

    @property
    def numbers(self) -> range:
        """Shard numbers."""
        return range(len(self.layout.shards))

    def bytes(self, numbers: range | list[int]) -> int:
        """Bytes of these shards without their headers."""
        return sum(self.layout.tokens(n) for n in numbers) * self.form.bytes

    def file(self, number: int) -> Path:
        """Path of a shard."""
        return self.folder / f"shard-{number:05d}.safetensors"

    def fault(self, number: int, verify: bool) -> str | None:
        """Why this shard cannot be used, `ABSENT` included; None where it can. verify: also compare the checksum, which reads
        the whole shard; otherwise only size and header are checked.
        """
        file = self.file(number)
        try:
            record = Record(**json.loads(file.with_suffix(".json").read_text(encoding="utf-8")))
            size = file.stat().st_size
        except (OSError, ValueError, TypeError):
            return ABSENT if not file.exists() else "no record of it"
        if size != record.bytes:
            return f"{size:,} bytes instead of {record.bytes:,}"
        if verify:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if digest != record.sha256:
                return f"sha256 {digest[:12]}... instead of {record.sha256[:12]}..."
            return None
        try:
            self._opened(number)
        except (OSError, SafetensorError, ValueError) as error:
            return str(error)
        return None

    def _opened(self, number: int) -> Any:
        """A shard, mapped. Raises ValueError for other columns than the format's, SafetensorError for another kind of file."""
        shard, rows = safe_open(self.file(number), framework="pt"), self.layout.tokens(number)
        for name, column in self.form.columns.items():
            stored = shard.get_slice(name)
            if stored.get_shape() != [rows, *column.shape] or stored[:0].dtype != column.dtype:
                raise ValueError(f"{name} is {stored.get_dtype()} {stored.get_shape()} in it")
        return shard

    def buffers(self, number: int) -> dict[str, Tensor]:
        """Empty tensors for a shard's columns."""
        rows = self.layout.tokens(number)
        return {name: torch.empty(rows, *c.shape, dtype=c.dtype) for name, c in self.form.columns.items()}

    def write(self, number: int, columns: Mapping[str, Tensor]) -> None:
        """Write a shard atomically. Raises UserError on a full disk."""
        content, file = save(dict(columns)), self.file(number)
        file.with_suffix(".json").unlink(missing_ok=True)
        atomic_write_bytes(file, content, FULL)
        record = Record(len(content), hashlib.sha256(content).hexdigest())
        atomic_write_bytes(file.with_suffix(".json"), json.dumps(asdict(record)).encode(), FULL)

    def describe(self, target: Mapping[str, Any]) -> None:
        """Write index.json, which nothing reads back."""
        figures = {"shards": len(self.numbers), "texts": len(self.layout.sequences), "bytes": self.bytes(self.numbers)}
        atomic_write_json(self.folder / "index.json", {"identity": self.identity, **figures, "target": dict(target)})

    def read(self, place: RowPlace) -> dict[str, Tensor]:
        """The columns' rows at this place, mapped from the file. Raises UserError if the shard is gone or has changed."""
        if place.shard not in self._mapped:
            while len(self._mapped) >= MAX_MAPPED:
                self._mapped.popitem(last=False)
            try:
                self._mapped[place.shard] = self._opened(place.shard)
            except (OSError, SafetensorError, ValueError) as error:
                file = self.file(place.shard)
                raise UserError(f"{file}: damaged or gone ({error}); start again, and it is computed again") from error
        self._mapped.move_to_end(place.shard)
        shard = self._mapped[place.shard]
        return {name: shard.get_slice(name)[place.start : place.stop] for name in self.form.columns}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the set for writing. One process of a run holds the lock for all. Raises UserError while another run writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another run is writing the features in {self.folder}; wait until it is done, or set features.dir"
                ) from error
            remove_leftovers(self.folder)
            yield
