"""A set of features on disk: their form, and safetensors shards, written atomically, with their expected sizes and checksums.

<folder>/index.json              for people only: what the features belong to, what the folder's name is a hash of, and sizes
<folder>/shard-00000.safetensors the columns of `FeatureFormat`, [N, ...] each
<folder>/shard-00000.json        size and sha256, written after the shard: a shard without this file counts as absent

Which conversations a shard has depends only on the conversations, not on the processes that compute them (`ShardLayout`).
Shapes: N positions, C of them at once, H hidden, V vocabulary; `...` any leading dimensions.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_bytes, atomic_write_json, remove_leftovers
from drafttrain.model.batch import Top
from drafttrain.model.images import FIRST
from drafttrain.model.target import FINAL, Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = 1e-30  # lower bound of a row's magnitude, so that the scale of a row of zeros is a normal number
LOG_REST = "law.log_rest"
CHUNK = 1024  # positions whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor of a shard, [N, *shape]."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes per position."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FeatureFormat:
    """The stored form of the target's states: which tensors a position has for `keys` (`Taps.keys`), and their dtypes.

    float8 is e4m3 with one float32 scale per position and state, which maps the largest magnitude to 448.
    """

    keys: tuple[int, ...]
    format: str
    hidden_size: int
    top: int = 0  # tokens whose log-probabilities are stored per position; 0: the final state is stored instead

    @property
    def columns(self) -> dict[str, Column]:
        """A shard's tensors by name."""
        columns = {}
        for key in self.keys:
            columns[name_of(key)] = Column(DTYPES[self.format], (self.hidden_size,))
            if self.format == "float8":
                columns[scale_of(key)] = Column(torch.float32)
        if self.top:
            columns |= {"law.id": Column(torch.int32, (self.top,)), "law.log_p": Column(torch.float32, (self.top,))}
            columns[LOG_REST] = Column(torch.float32)
        return columns

    @property
    def bytes(self) -> int:
        """Bytes per position."""
        return sum(column.bytes for column in self.columns.values())

    def encode(self, hidden: Mapping[int, Tensor], target: Target) -> dict[str, Tensor]:
        """The columns of N positions from the target's states, [N, H] each. The final state must be among them."""
        columns = {}
        for key in self.keys:
            state_NH = hidden[key]
            if self.format == "float8":
                scale_N = state_NH.float().abs().amax(-1).clamp_min(SMALLEST) / LARGEST
                state_NH, columns[scale_of(key)] = state_NH.float() / scale_N[:, None], scale_N
            columns[name_of(key)] = state_NH.to(DTYPES[self.format])
        if self.top:
            chunks = [self._top(target.head(final_CH)) for final_CH in hidden[FINAL].split(CHUNK)]
            columns |= {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        return columns

    def _top(self, logits_CV: Tensor) -> dict[str, Tensor]:
        """The k largest log-probabilities and the log of the remaining mass."""
        logits_CV = logits_CV.float()
        top_k = logits_CV.topk(self.top, -1)
        log_z_C = logits_CV.logsumexp(-1)
        log_rest_C = logits_CV.scatter(1, top_k.indices, -torch.inf).logsumexp(-1)
        return {"law.id": top_k.indices.int(), "law.log_p": top_k.values - log_z_C[:, None], LOG_REST: log_rest_C - log_z_C}

    def states(self, columns: Mapping[str, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        """The stored states by tap key, [..., H] each."""
        states = {}
        for key in self.keys:
            state_H = columns[name_of(key)]
            if self.format == "float8":
                state_H = state_H.float() * columns[scale_of(key)][..., None]
            states[key] = state_H.to(dtype)
        return states

    def top_k(self, columns: Mapping[str, Tensor]) -> Top | None:
        """The stored top-k distribution; None where the final state is stored instead."""
        return Top(columns["law.id"].long(), columns["law.log_p"], columns[LOG_REST]) if self.top else None


def name_of(key: int) -> str:
    """Column name of a tapped state."""
    return "final" if key == FINAL else f"block.{key}"


def scale_of(key: int) -> str:
    """Column name of a tapped state's float8 scales."""
    return f"{name_of(key)}.scale"


Ids = NDArray[Any]  # int32; int64 with ids of images
MAX_SHARD_BYTES = 2**28
MIN_SHARDS = 64  # so that processes get similar shares and a damaged shard costs little
MIN_SHARD_TOKENS = 2**13  # enough for one forward of the target
VERSION = 1  # of the layout too
ABSENT = "absent"
MAX_MAPPED = 64  # shards that stay mapped
FULL = "complete shards are kept, and the same command continues after them; free space, or set features.dir to another disk"


def key_of(ids: Ids) -> str:
    """A conversation's key: a hash of its token ids, on which alone a frozen target's states depend.

    Ids of images name their content, and need eight bytes.
    """
    needs_int64 = len(ids) > 0 and int(ids.max()) >= FIRST
    return hashlib.blake2b(ids.astype("<i8" if needs_int64 else "<i4").tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Rows `start` to `stop` of a shard."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True)
class ShardLayout:
    """Conversations and the shards that hold them."""

    sequences: tuple[Ids, ...]  # token ids of every conversation once, the shortest first
    shards: tuple[range, ...]  # the conversations of each shard, as indices into `sequences`

    @staticmethod
    def of(documents: Iterable[Ids], position_bytes: int) -> ShardLayout:
        """Shards of `MAX_SHARD_BYTES`, or smaller if that gives fewer than `MIN_SHARDS`. A conversation is never divided."""
        ids_by_key = {key_of(ids): ids for ids in documents}
        sequences = [ids for _, ids in sorted(ids_by_key.items(), key=lambda item: (len(item[1]), item[0]))]
        sizes = [len(ids) for ids in sequences]
        shard_tokens = max(sum(sizes) // MIN_SHARDS, MIN_SHARD_TOKENS)
        return ShardLayout(tuple(sequences), tuple(_groups(sizes, min(MAX_SHARD_BYTES // position_bytes, shard_tokens))))

    def tokens(self, shard: int) -> int:
        """Tokens of a shard."""
        return sum(len(self.sequences[i]) for i in self.shards[shard])

    def passes(self, shard: int, positions: int) -> list[Sequence[Ids]]:
        """The shard's conversations, in order, in batches of at most `positions` positions, padding included."""
        batches: list[list[Ids]] = []
        for i in self.shards[shard]:
            sequence = self.sequences[i]  # the longest of its batch, since lengths ascend
            if not batches or (len(batches[-1]) + 1) * len(sequence) > positions:
                batches.append([])
            batches[-1].append(sequence)
        return list(batches)

    @cached_property
    def places(self) -> dict[str, RowPlace]:
        """Each conversation's place by its key."""
        places = {}
        for shard_index, shard in enumerate(self.shards):
            start = 0
            for i in shard:
                stop = start + len(self.sequences[i])
                places[key_of(self.sequences[i])] = RowPlace(shard_index, start, stop)
                start = stop
        return places

    @cached_property
    def digest(self) -> str:
        """Hash of the set of conversations, whatever their order."""
        return hashlib.sha256("\n".join(sorted(self.places)).encode()).hexdigest()


def _groups(sizes: Sequence[int], most: int) -> Iterable[range]:
    """Consecutive indices whose sizes add up to at most `most`; a single larger one is its own group."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if total and total + size > most:
            yield range(start, i)
            start, total = i, 0
        total += size
    if total:
        yield range(start, len(sizes))


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
