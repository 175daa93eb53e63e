"""Reads target states from disk, batch by batch. The target's blocks do not run.

The next batch is read in a thread while the current one trains, into pinned host memory for a GPU.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from drafttrain.features.store import Column, FeatureStore, key_of
from drafttrain.model.batch import TrainBatch

ALIGNED = 64  # bytes; each column of a buffer starts at a multiple
Input = TypeVar("Input")
Output = TypeVar("Output")
BUFFERS = 2  # one is filled while the other is copied


@dataclass(frozen=True, slots=True)
class HostColumns:
    """A batch's columns in host memory."""

    columns: dict[str, Tensor]  # [B, T, ...] by name
    buffer: Tensor | None = None  # the pinned buffer that holds them, if any


class Cached:
    """Adds the stored states to batches of conversations that `store` holds complete. device, dtype: the target's.

    `begin` reads the next batch while this one trains. Where the target is on a GPU, it reads into pinned memory, so that the
    copy to the GPU does not block the host. The states are the same with and without `begin`.
    """

    ahead = 1  # batches that may be begun before they are filled

    def __init__(self, store: FeatureStore, device: torch.device, dtype: torch.dtype) -> None:
        self.store, self.device, self.dtype = store, device, dtype
        self._ahead: ReadAhead[TrainBatch, HostColumns] = ReadAhead(self._read, device)
        self._buffers = HostBuffers(device) if device.type == "cuda" else None

    def begin(self, batch: TrainBatch) -> None:
        """Start to read the next batch. Errors are raised when that batch is filled."""
        self._ahead.start(batch)

    def fill(self, batch: TrainBatch) -> TrainBatch:
        """The batch on the target's device with the states that `Online.fill` would compute. Padding holds zeros.

        States are copied in their stored format and converted to the target's dtype on the device.
        """
        host_columns, form = self._ahead.get(batch), self.store.form
        columns = host_columns.columns
        if self._buffers is not None and host_columns.buffer is not None:
            columns = {name: column.to(self.device, non_blocking=True, copy=True) for name, column in columns.items()}
            self._buffers.give(host_columns.buffer)
        return replace(batch.to(self.device), hidden=form.states(columns, self.dtype), top=form.top_k(columns))

    def close(self) -> None:
        """Stop the reading thread and drop the batch it read ahead. Batches can still be filled."""
        self._ahead.close()

    def _read(self, batch: TrainBatch) -> HostColumns:
        """Read from disk, in the reading thread or, while there is none, in the caller's."""
        T, first = batch.token_BT.shape[1], batch.span.first if batch.span else 0
        host_columns = self._zeros(*batch.token_BT.shape)
        for document in documents((batch.whole or batch).to(torch.device("cpu"))):
            start, stop = max(document.start, first), min(document.stop, first + T)
            if start < stop:
                placement = self.store.layout.places[document.key]
                placement = replace(
                    placement, start=placement.start + start - document.start, stop=placement.start + stop - document.start
                )
                for name, rows in self.store.read(placement).items():
                    host_columns.columns[name][document.row, start - first : stop - first] = rows
        return host_columns

    def _zeros(self, rows: int, length: int) -> HostColumns:
        """Zeroed columns of this many rows and positions."""
        specs = self.store.form.columns
        if self._buffers is None:
            return HostColumns({name: torch.zeros(rows, length, *c.shape, dtype=c.dtype) for name, c in specs.items()})
        sizes = {name: -(-rows * length * c.bytes // ALIGNED) * ALIGNED for name, c in specs.items()}
        buffer, columns, offset = self._buffers.take(sum(sizes.values())), dict[str, Tensor](), 0
        for name, column in specs.items():
            columns[name] = _column(buffer[offset : offset + sizes[name]], rows, length, column)
            offset += sizes[name]
        return HostColumns(columns, buffer)


def _column(buffer_slice: Tensor, rows: int, length: int, column: Column) -> Tensor:
    """A [B, T, ...] view of zeros on a part of a byte buffer."""
    zeroed = buffer_slice[: rows * length * column.bytes].zero_().view(column.dtype)
    assert zeroed.numel() == rows * length * prod(column.shape)
    return zeroed.view(rows, length, *column.shape)


@dataclass(frozen=True, slots=True)
class Document:
    """One conversation in a batch: columns `start` to `stop` of a row."""

    row: int
    start: int
    stop: int
    key: str  # `key_of` its token ids


def documents(batch: TrainBatch) -> Iterator[Document]:
    """All documents of a batch, row by row."""
    for row, (token_T, document_T) in enumerate(zip(batch.token_BT, batch.document_BT, strict=True)):
        indices, counts = document_T.unique_consecutive(return_counts=True)
        start = 0
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
            if index >= 0:
                yield Document(row, start, start + count, key_of(token_T[start : start + count].numpy()))
            start += count


class ReadAhead(Generic[Input, Output]):
    """`compute`, one call ahead, in a thread that the first `start` opens and `close` ends.

    `compute` never runs twice at a time. device: the device that the thread works for.
    """

    def __init__(self, compute: Callable[[Input], Output], device: torch.device) -> None:
        self._compute, self._device = compute, device
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[Input, Future[Output]] | None = None

    def start(self, batch: Input) -> None:
        """Start to compute the next batch. An earlier one that was not fetched is dropped."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "features", self._enter)
        if self._next is not None:
            self._next[1].cancel()
        self._next = batch, self._thread.submit(self._compute, batch)

    def get(self, batch: Input) -> Output:
        """The result that was started for this batch object, else a new one. Raises what `compute` raises for it."""
        if self._next is not None and self._next[0] is batch:
            (_, future), self._next = self._next, None
            return future.result()
        return self._compute(batch) if self._thread is None else self._thread.submit(self._compute, batch).result()

    def close(self) -> None:
        """Wait for a running call, drop its result and end the thread. `start` opens a new one."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _enter(self) -> None:
        if self._device.type == "cuda":  # otherwise the thread's first CUDA call opens a context on GPU 0
            torch.cuda.set_device(self._device)


class HostBuffers:
    """Pinned memory for copies to a GPU, reused after a copy has finished. One thread takes buffers, one gives them back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_use: deque[tuple[Tensor, Any]] = deque()

    def take(self, size: int) -> Tensor:
        """At least `size` bytes that no copy reads. Once `BUFFERS` are in use, waits for the oldest copy."""
        if len(self._in_use) >= BUFFERS:
            buffer, copy_event = self._in_use.popleft()
            copy_event.synchronize()
            if len(buffer) >= size:
                return buffer
        return self._allocated(size)

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back whose copies were enqueued on the device's current stream."""
        self._in_use.append((buffer, self._copy_event()))

    def _allocated(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _copy_event(self) -> Any:
        """An event that follows all work enqueued on the device's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
