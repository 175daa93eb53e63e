"""A set of features on disk: safetensors shards that appear whole, and what each should be.

<folder>/index.json              for people alone: what the features are of, what their name is a hash of, and figures
<folder>/shard-00000.safetensors the columns of `Form`, [N, ...] each
<folder>/shard-00000.json        its size and sha256, written behind it: a shard without is not there
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
from drafttrain.features.form import Form
from drafttrain.features.layout import Layout, Place

VERSION = 1  # of the layout too
ABSENT = "absent"
OPEN = 64  # shards that stay mapped
FULL = "complete shards are, and the same command goes on behind them; free space, or set features.dir to another disk"


@dataclass(frozen=True, slots=True)
class Record:
    """What a shard's file must be."""

    bytes: int
    sha256: str


class Store:
    """The features of `layout` in `form` below `root`. description: what else decides their values, such as the target."""

    def __init__(self, root: Path, layout: Layout, form: Form, description: Mapping[str, Any]) -> None:
        self.layout, self.form = layout, form
        self.identity = {"version": VERSION, **description, "form": asdict(form), "texts": layout.digest}
        name = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = root / name
        self._mapped: OrderedDict[int, Any] = OrderedDict()

    @property
    def numbers(self) -> range:
        return range(len(self.layout.shards))

    def bytes(self, numbers: range | list[int]) -> int:
        """What these shards take, but for their headers."""
        return sum(self.layout.tokens(n) for n in numbers) * self.form.bytes

    def file(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"

    def fault(self, number: int, verify: bool) -> str | None:
        """Why this shard cannot be used, None where it can. Absent is a fault too. verify: read it whole, for its checksum;
        else its size and its header alone.
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
                found = hashlib.file_digest(content, "sha256").hexdigest()
            if found != record.sha256:
                return f"sha256 {found[:12]}... instead of {record.sha256[:12]}..."
            return None
        try:
            self._opened(number)
        except (OSError, SafetensorError, ValueError) as error:
            return str(error)
        return None

    def _opened(self, number: int) -> Any:
        """A shard, mapped. Raises ValueError unless it has the form's columns, SafetensorError where it is no such file."""
        shard, rows = safe_open(self.file(number), framework="pt"), self.layout.tokens(number)
        for name, column in self.form.columns.items():
            found = shard.get_slice(name)
            if found.get_shape() != [rows, *column.shape] or found[:0].dtype != column.dtype:
                raise ValueError(f"{name} is {found.get_dtype()} {found.get_shape()} in it")
        return shard

    def buffers(self, number: int) -> dict[str, Tensor]:
        """A shard's columns, to be filled."""
        rows = self.layout.tokens(number)
        return {name: torch.empty(rows, *c.shape, dtype=c.dtype) for name, c in self.form.columns.items()}

    def write(self, number: int, columns: Mapping[str, Tensor]) -> None:
        """Whole or not at all. Raises UserError on a full disk."""
        content, file = save(dict(columns)), self.file(number)
        file.with_suffix(".json").unlink(missing_ok=True)
        atomic_write_bytes(file, content, FULL)
        record = Record(len(content), hashlib.sha256(content).hexdigest())
        atomic_write_bytes(file.with_suffix(".json"), json.dumps(asdict(record)).encode(), FULL)

    def describe(self, target: Mapping[str, Any]) -> None:
        """For people: what these features are of."""
        figures = {"shards": len(self.numbers), "texts": len(self.layout.texts), "bytes": self.bytes(self.numbers)}
        atomic_write_json(self.folder / "index.json", {"identity": self.identity, **figures, "target": dict(target)})

    def read(self, place: Place) -> dict[str, Tensor]:
        """The columns' rows there, mapped from the file. Raises UserError where the shard is gone or another by now."""
        if place.shard not in self._mapped:
            while len(self._mapped) >= OPEN:
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
        """For one process at a time, whose others may then write too. Raises UserError where another run is writing them."""
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
