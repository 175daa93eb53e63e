"""All conversations of a run, as far as they are prepared: what is on disk, and what workers add while training runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded, Encoder
from drafttrain.data.sources import Source
from drafttrain.data.store import Store, blocks_in, key_of
from drafttrain.data.workers import Done, Follower, Here, Pool, Task, Team

CHUNK = 256  # records of a task
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Workers:
    """folder: of prepared data; None: this process prepares in memory. count: processes. leads: others of this machine wait."""

    folder: Path | None = None
    count: int = 1
    leads: bool = True


class Conversations:
    """Conversations by number, source after source. bad: how many records may be wrong."""

    def __init__(self, sources: Sequence[Source], encoder: Encoder, workers: Workers, bad: int = 0) -> None:
        self.sources, self.encoder, self.workers, self.bad = list(sources), encoder, workers, bad
        self.sizes = [len(source.records) for source in sources]
        self.first = np.concatenate([[0], np.cumsum(self.sizes)])
        self.count = int(self.first[-1])
        self.blocks: list[Done] = []
        self.faults: list[str] = []
        self.missing = self.count  # those that are not prepared
        self.documents_C = np.full(self.count, UNKNOWN, np.int32)  # rows of each
        self._block_C, self._place_C = (np.zeros(self.count, np.int32) for _ in range(2))
        self._asked_C = np.zeros(self.count, np.bool_)
        self._team: Team | None = None
        self._seen: list[set[str]] = []
        self._stores: list[Store] = []
        if workers.folder is not None:
            self._stores = [Store(workers.folder / key_of(source, encoder)) for source in sources]
            for number, store in enumerate(self._stores):
                names = store.names()
                blocks = blocks_in(store, names)
                for name in names - blocks.keys() if workers.leads else ():
                    store.remove(name)
                for block in blocks.values():
                    self._add(Done(number, block), block.sound_N)  # what was wrong may have been mended, or lie elsewhere
                self._seen.append(set(blocks))

    @property
    def name(self) -> str:
        """What the user calls them."""
        return "data.path=" + ", ".join(source.name for source in self.sources)

    def ask(self, numbers: NDArray[np.int64]) -> None:
        """Have those prepared that are missing, in this order, after what was asked for before."""
        numbers = numbers[(self.documents_C[numbers] == UNKNOWN) & ~self._asked_C[numbers]]
        numbers = numbers[np.sort(np.unique(numbers, return_index=True)[1])]
        self._asked_C[numbers] = True
        if not len(numbers):
            return
        if self._team is None:
            self._team = self._begin()
        self._team.add(list(self._tasks(numbers)))

    def _begin(self) -> Team:
        if self.workers.folder is None:
            return Here(self.sources, self.encoder)
        if self.workers.leads:
            return Pool(self.sources, self.encoder, self._stores, self.workers.count)
        return Follower(self._stores, self._seen)

    def wait(self, numbers: NDArray[np.int64], advance: Callable[[int], None] = lambda done: None) -> None:
        """Until these are prepared. advance: told of how many more are. Raises UserError for records that are wrong."""
        self.ask(numbers)
        left = numbers[self.documents_C[numbers] == UNKNOWN]
        while len(left):
            assert self._team is not None, "asked for"
            before = len(left)
            self._add(next(self._team))
            left = left[self.documents_C[left] == UNKNOWN]
            advance(before - len(left))

    def rows(self, number: int) -> list[Encoded]:
        """What this conversation gives; none where nothing of it can be learnt."""
        if self.documents_C[number] == UNKNOWN:
            self.wait(np.array([number]))
        return self.encoded(number).split() if self.documents_C[number] else []

    def encoded(self, number: int) -> Encoded:
        """Of one that is prepared."""
        return self.blocks[self._block_C[number]].block.row(int(self._place_C[number]))

    @property
    def complete(self) -> bool:
        return not self.missing

    def close(self) -> None:
        """End the workers; what they have written is kept, and counted."""
        if self._team is not None:
            for done in self._team.finished():
                self._add(done, done.block.sound_N)
            self._team.close()

    def _tasks(self, order: NDArray[np.int64]) -> Iterator[Task]:
        for start in range(0, len(order), CHUNK):
            chunk = order[start : start + CHUNK]
            source_of = np.searchsorted(self.first, chunk, side="right") - 1
            for source in np.unique(source_of).tolist():
                yield Task(source, (chunk[source_of == source] - self.first[source]).tolist())

    def _add(self, done: Done, taken_N: NDArray[np.bool_] | None = None) -> None:
        """taken_N: which of its records; None: all."""
        inside_N = done.block.record_N < self.sizes[done.source]
        places = np.flatnonzero(inside_N if taken_N is None else inside_N & taken_N)
        numbers = self.first[done.source] + done.block.record_N[places]
        fresh = self.documents_C[numbers] == UNKNOWN
        self.missing -= int(fresh.sum())
        self.documents_C[numbers] = done.block.documents_N[places]
        self._block_C[numbers], self._place_C[numbers] = len(self.blocks), places
        self.blocks.append(done)
        for place in places[fresh & ~done.block.sound_N[places]].tolist():
            self._refuse(str(done.block.batch["fault"][place]))

    def held(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(numbers, places) of the conversations that are read from this block."""
        done = self.blocks[block]
        places = np.flatnonzero(done.block.record_N < self.sizes[done.source])
        numbers = self.first[done.source] + done.block.record_N[places]
        own = (self._block_C[numbers] == block) & (self._place_C[numbers] == places) & (self.documents_C[numbers] != UNKNOWN)
        return numbers[own], places[own]

    def _refuse(self, fault: str) -> None:
        self.faults.append(fault)
        if len(self.faults) > self.bad:
            more = f" (bad record {len(self.faults)}, data.bad_records={self.bad} are skipped)" if self.bad else ""
            raise UserError(f"{fault}{more}")


class Rows(Sequence[Encoded]):
    """The rows of some conversations, numbered as they are first asked for. Its length waits for all of them."""

    def __init__(self, conversations: Conversations, numbers: NDArray[np.int64]) -> None:
        self.conversations, self.numbers = conversations, numbers
        self._first_C = np.full(len(numbers), UNKNOWN, np.int64)
        self._number, self._document = array("q"), array("l")  # of each row

    @property
    def size(self) -> int:
        return len(self.numbers)

    def rows(self, conversation: int) -> Sequence[int]:
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
        return self.conversations.complete

    def total(self, conversations: NDArray[np.int64]) -> int:
        return int(self.conversations.documents_C[self.numbers[conversations]].sum())

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
