"""Target states read from disk, batch by batch: the target's blocks do not run.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from drafttrain.features.form import Column
from drafttrain.features.layout import key_of
from drafttrain.features.reader import HostBuffers, ReadAhead
from drafttrain.features.store import Store
from drafttrain.model.batch import TrainBatch

ALIGNED = 64  # bytes at whose multiples a column begins in a buffer


@dataclass(frozen=True, slots=True)
class Read:
    """A batch's columns on the host, by name, [B, T, ...], and the pinned buffer they lie in, if they do."""

    columns: dict[str, Tensor]
    buffer: Tensor | None = None


class Cached:
    """Fills batches of the conversations that `store` holds whole. device, dtype: the target's.

    `begin` reads the next batch while this one trains: into pinned memory where the target is on a GPU, which then copies it
    without the host waiting. A batch's states are the same either way.
    """

    def __init__(self, store: Store, device: torch.device, dtype: torch.dtype) -> None:
        self.store, self.device, self.dtype = store, device, dtype
        self._ahead: ReadAhead[TrainBatch, Read] = ReadAhead(self._read, device)
        self._buffers = HostBuffers(device) if device.type == "cuda" else None

    def begin(self, batch: TrainBatch) -> None:
        """Begin to read the batch that will be trained on next. What fails is raised when it is filled."""
        self._ahead.start(batch)

    def fill(self, batch: TrainBatch) -> TrainBatch:
        """The batch on the target's device with what `Online.fill` would compute; padding holds zeros.

        States travel as they are stored, and get the target's dtype there.
        """
        read, form = self._ahead.get(batch), self.store.form
        columns = read.columns
        if self._buffers is not None and read.buffer is not None:
            columns = {name: column.to(self.device, non_blocking=True, copy=True) for name, column in columns.items()}
            self._buffers.give(read.buffer)
        return replace(batch.to(self.device), hidden=form.states(columns, self.dtype), top=form.law(columns))

    def close(self) -> None:
        """End the reading thread; what was begun is dropped. Batches can still be filled."""
        self._ahead.close()

    def _read(self, batch: TrainBatch) -> Read:
        """From disk, by the reading thread, or by the caller's while there is none."""
        T, first = batch.token_BT.shape[1], batch.span.first if batch.span else 0
        read = self._zeros(*batch.token_BT.shape)
        for document in documents((batch.whole or batch).to(torch.device("cpu"))):
            start, stop = max(document.start, first), min(document.stop, first + T)
            if start < stop:
                place = self.store.layout.places[document.key]
                place = replace(place, start=place.start + start - document.start, stop=place.start + stop - document.start)
                for name, part in self.store.read(place).items():
                    read.columns[name][document.row, start - first : stop - first] = part
        return read

    def _zeros(self, rows: int, length: int) -> Read:
        """Columns of so many rows and positions that are to be filled."""
        wanted = self.store.form.columns
        if self._buffers is None:
            return Read({name: torch.zeros(rows, length, *c.shape, dtype=c.dtype) for name, c in wanted.items()})
        sizes = {name: -(-rows * length * c.bytes // ALIGNED) * ALIGNED for name, c in wanted.items()}
        buffer, columns, at = self._buffers.take(sum(sizes.values())), dict[str, Tensor](), 0
        for name, column in wanted.items():
            columns[name] = _column(buffer[at : at + sizes[name]], rows, length, column)
            at += sizes[name]
        return Read(columns, buffer)


def _column(room: Tensor, rows: int, length: int, column: Column) -> Tensor:
    """[B, T, ...] zeros in a part of a buffer of bytes."""
    used = room[: rows * length * column.bytes].zero_().view(column.dtype)
    assert used.numel() == rows * length * prod(column.shape)
    return used.view(rows, length, *column.shape)


@dataclass(frozen=True, slots=True)
class Document:
    """Columns `start` to `stop` of a batch's row."""

    row: int
    start: int
    stop: int
    key: str


def documents(batch: TrainBatch) -> Iterator[Document]:
    """All of a batch, row by row."""
    for row, (token_T, document_T) in enumerate(zip(batch.token_BT, batch.document_BT, strict=True)):
        numbers, counts = document_T.unique_consecutive(return_counts=True)
        start = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                yield Document(row, start, start + count, key_of(token_T[start : start + count].numpy()))
            start += count
