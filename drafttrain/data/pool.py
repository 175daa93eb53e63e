"""All conversations of a run: those on disk, and those that workers add while training runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from drafttrain.data.chat import Encoded, Encoder
from drafttrain.data.sources import Faults, Source
from drafttrain.data.store import BlockStore, blocks_in, key_of
from drafttrain.data.workers import Follower, InProcess, PreparedBlock, Preparer, Task, WorkerPool

CHUNK = 256  # records per task
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Workers:
    """Who prepares the data."""

    folder: Path | None = None  # folder of prepared data; None: this process prepares in memory
    count: int = 1  # number of worker processes
    leads: bool = True  # whether this process prepares; the others of its machine wait for it


class Conversations:
    """Conversations by number, source after source. faults: counts unusable records."""

    def __init__(self, sources: Sequence[Source], encoder: Encoder, workers: Workers, faults: Faults | None = None) -> None:
        self.sources, self.encoder, self.workers = list(sources), encoder, workers
        self._faults = faults or Faults(0)
        self.sizes = [len(source.records) for source in sources]
        self.first = np.concatenate([[0], np.cumsum(self.sizes)])
        self.count = int(self.first[-1])
        self.blocks: list[PreparedBlock] = []
        self.missing = self.count  # conversations that are not prepared
        self.documents_C = np.full(self.count, UNKNOWN, np.int32)  # rows of each
        self._block_C, self._place_C = (np.zeros(self.count, np.int32) for _ in range(2))
        self._requested_C = np.zeros(self.count, np.bool_)
        self._preparer: Preparer | None = None
        self._seen: list[set[str]] = []
        self._stores: list[BlockStore] = []
        if workers.folder is not None:
            self._stores = [BlockStore(workers.folder / key_of(source, encoder)) for source in sources]
            for number, store in enumerate(self._stores):
                names = store.names()
                blocks = blocks_in(store, names)
                for name in names - blocks.keys() if workers.leads else ():
                    store.remove(name)
                for block in blocks.values():
                    self._add(PreparedBlock(number, block), block.sound_N)  # faulty records may have been mended since
                self._seen.append(set(blocks))

    @property
    def name(self) -> str:
        """The sources as the user names them."""
        return "data.path=" + ", ".join(source.name for source in self.sources)

    def request(self, numbers: NDArray[np.int64]) -> None:
        """Prepare the missing ones of these conversations, in this order, after those requested before."""
        numbers = numbers[(self.documents_C[numbers] == UNKNOWN) & ~self._requested_C[numbers]]
        numbers = numbers[np.sort(np.unique(numbers, return_index=True)[1])]
        self._requested_C[numbers] = True
        if not len(numbers):
            return
        if self._preparer is None:
            self._preparer = self._start()
        self._preparer.add(list(self._tasks(numbers)))

    def _start(self) -> Preparer:
        if self.workers.folder is None:
            return InProcess(self.sources, self.encoder)
        if self.workers.leads:
            return WorkerPool(self.sources, self.encoder, self._stores, self.workers.count)
        return Follower(self._stores, self._seen)

    def wait(self, numbers: NDArray[np.int64], advance: Callable[[int], None] = lambda done: None) -> None:
        """Wait until these are prepared. Raises UserError for unusable records. advance: called with numbers of newly prepared
        ones.
        """
        self.request(numbers)
        pending = numbers[self.documents_C[numbers] == UNKNOWN]
        while len(pending):
            assert self._preparer is not None, "the call of request above sets it"
            pending_before = len(pending)
            self._add(next(self._preparer))
            pending = pending[self.documents_C[pending] == UNKNOWN]
            advance(pending_before - len(pending))

    def rows(self, number: int) -> list[Encoded]:
        """This conversation's rows. Empty if it has no supervised token."""
        if self.documents_C[number] == UNKNOWN:
            self.wait(np.array([number]))
        return self.encoded(number).split() if self.documents_C[number] else []

    def encoded(self, number: int) -> Encoded:
        """The documents of a prepared conversation, as one row."""
        return self.blocks[self._block_C[number]].block.row(int(self._place_C[number]))

    def origin(self, number: int) -> str:
        """The place of a conversation's record: file and line."""
        source = int(np.searchsorted(self.first, number, side="right")) - 1
        return self.sources[source].records[number - int(self.first[source])][0]

    @property
    def complete(self) -> bool:
        """Whether all conversations are prepared."""
        return not self.missing

    def close(self) -> None:
        """Stop the workers. Blocks that they have written are kept and counted."""
        if self._preparer is not None:
            for prepared in self._preparer.finished():
                self._add(prepared, prepared.block.sound_N)
            self._preparer.close()

    def _tasks(self, order: NDArray[np.int64]) -> Iterator[Task]:
        for start in range(0, len(order), CHUNK):
            chunk = order[start : start + CHUNK]
            source_of = np.searchsorted(self.first, chunk, side="right") - 1
            for source in np.unique(source_of).tolist():
                yield Task(source, (chunk[source_of == source] - self.first[source]).tolist())

    def _add(self, prepared: PreparedBlock, taken_N: NDArray[np.bool_] | None = None) -> None:
        """Register a block. taken_N: which of its records; None: all."""
        in_range_N = prepared.block.record_N < self.sizes[prepared.source]
        indices = np.flatnonzero(in_range_N if taken_N is None else in_range_N & taken_N)
        numbers = self.first[prepared.source] + prepared.block.record_N[indices]
        is_new = self.documents_C[numbers] == UNKNOWN
        self.missing -= int(is_new.sum())
        self.documents_C[numbers] = prepared.block.documents_N[indices]
        self._block_C[numbers], self._place_C[numbers] = len(self.blocks), indices
        self.blocks.append(prepared)
        self.encoder.images.add(prepared.block.images())
        for index in indices[is_new & ~prepared.block.sound_N[indices]].tolist():
            self._faults.add(str(prepared.block.batch["fault"][index]))

    def entries_of(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(numbers, places) of the conversations that are read from this block."""
        prepared = self.blocks[block]
        indices = np.flatnonzero(prepared.block.record_N < self.sizes[prepared.source])
        numbers = self.first[prepared.source] + prepared.block.record_N[indices]
        current = (
            (self._block_C[numbers] == block) & (self._place_C[numbers] == indices) & (self.documents_C[numbers] != UNKNOWN)
        )
        return numbers[current], indices[current]

    @property
    def faults(self) -> list[str]:
        """Why unusable records are left out."""
        return self._faults.found


class PoolRows(Sequence[Encoded]):
    """The rows of some conversations, numbered in the order in which they are first read. `len` waits for all of them."""

    def __init__(self, conversations: Conversations, numbers: NDArray[np.int64]) -> None:
        self.conversations, self.numbers = conversations, numbers
        self._first_C = np.full(len(numbers), UNKNOWN, np.int64)
        self._number, self._document = array("q"), array("l")  # of each row

    @property
    def size(self) -> int:
        """Number of conversations."""
        return len(self.numbers)

    def rows(self, conversation: int) -> Sequence[int]:
        """Row numbers of a conversation. Waits until it is prepared."""
        number = self.numbers[conversation]
        if self.conversations.documents_C[number] == UNKNOWN:
            self.conversations.wait(self.numbers[conversation : conversation + 1])
        documents = int(self.conversations.documents_C[number])
        if self._first_C[conversation] == UNKNOWN:
            self._first_C[conversation] = len(self._number)
            self._number.extend([int(number)] * documents)
            self._document.extend(range(documents))
        first = int(self._first_C[conversation])
        return range(first, first + documents)

    @property
    def complete(self) -> bool:
        """Whether all conversations are prepared."""
        return self.conversations.complete

    def total(self, conversations: NDArray[np.int64]) -> int:
        """Number of rows of these conversations, which must be prepared."""
        return int(self.conversations.documents_C[self.numbers[conversations]].sum())

    def origin(self, row: int) -> str:
        """The place of the record of a row that has been read."""
        return self.conversations.origin(self._number[row])

    def __bool__(self) -> bool:
        return bool(len(self.numbers))

    def __len__(self) -> int:
        self.conversations.wait(self.numbers)
        for conversation in np.flatnonzero(self._first_C == UNKNOWN).tolist():
            self.rows(conversation)
        return len(self._number)

    @overload
    def __getitem__(self, row: int) -> Encoded: ...
    @overload
    def __getitem__(self, row: slice) -> list[Encoded]: ...
    def __getitem__(self, row: int | slice) -> Encoded | list[Encoded]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        row = row if row >= 0 else len(self) + row
        if row >= len(self._number) and row >= len(self):
            raise IndexError(f"row {row} of {len(self._number)}")
        encoded = self.conversations.encoded(self._number[row])
        return encoded if len(encoded.starts) == 1 else encoded.split()[self._document[row]]
