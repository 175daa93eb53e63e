"""The rows of each epoch in order, packed or not. The order depends only on the seed and becomes known as rows are prepared.

An epoch is a shuffle of all conversations, or of as many that are drawn from several sources by weight. It is cut into windows
of `WINDOW` batches. Each window is sorted by length and its batches are shuffled, so that a batch has little padding.
Conversations without rows are skipped; the rows of one conversation follow each other. A window is known once its conversations
are prepared. So training starts while others are being prepared, and gets the same batches as if all had been prepared before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded, join
from drafttrain.data.pool import PoolRows


class Packed(Sequence[Encoded]):
    """Rows of several conversations each, joined on access. members: each row's conversations, as indices into `rows`."""

    def __init__(self, rows: Sequence[Encoded], members: list[list[int]]) -> None:
        self.rows, self.members = rows, members

    @property
    def tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return sum(len(self.rows[i].token_ids) for members in self.members for i in members)

    def origin(self, row: int) -> str:
        """The records of a row, as messages name them: what is wrong with a row is so with one of them at least."""
        origins = [self.rows.origin(i) for i in self.members[row]] if isinstance(self.rows, PoolRows) else []
        records = list(dict.fromkeys(origins)) or [f"row {row + 1}"]
        return records[0] if len(records) == 1 else f"one of {', '.join(records)}"

    def __len__(self) -> int:
        return len(self.members)

    @overload
    def __getitem__(self, row: int) -> Encoded: ...
    @overload
    def __getitem__(self, row: slice) -> list[Encoded]: ...
    def __getitem__(self, row: int | slice) -> Encoded | list[Encoded]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        return join([self.rows[i] for i in self.members[row]])


def pack(rows: Sequence[Encoded], length: int, chosen: Sequence[int] | None = None) -> Packed:
    """Rows of at most `length` tokens with all these conversations: the longest first, each into the fullest row that has room.

    Best fit decreasing (Johnson 1974) needs at most 11/9 of the minimal number of rows, and nearly the minimum if many are
    short. chosen: indices into `rows`, some perhaps several times; None: each once.
    """
    members: list[list[int]] = []
    rows_by_free: dict[int, list[int]] = {}  # rows by their number of free tokens
    free_sizes = 0  # a bit for every key of rows_by_free
    lengths = {i: len(rows[i].token_ids) for i in (range(len(rows)) if chosen is None else chosen)}
    for i in sorted(lengths if chosen is None else chosen, key=lambda i: (-lengths[i], i)):
        size = lengths[i]
        fitting_sizes = free_sizes >> size
        if fitting_sizes:
            free_tokens = size + (fitting_sizes & -fitting_sizes).bit_length() - 1
            row = rows_by_free[free_tokens].pop()
            if not rows_by_free[free_tokens]:
                free_sizes ^= 1 << free_tokens
        else:
            free_tokens, row = length, len(members)
            members.append([])
        members[row].append(i)
        rows_by_free.setdefault(free_tokens - size, []).append(row)
        free_sizes |= 1 << (free_tokens - size)
    return Packed(rows, members)


WINDOW = 16  # batches that are sorted by length together
MIX = 0x6D6978  # separates these seeds from those of epochs


class Groups(Protocol):
    """The training conversations by number, each a group of rows."""

    @property
    def size(self) -> int: ...

    @property
    def complete(self) -> bool:
        """Whether all conversations are prepared."""
        ...

    def rows(self, conversation: int) -> Sequence[int]:
        """Row numbers of a conversation. Waits until it is prepared."""
        ...

    def total(self, conversations: NDArray[np.int64]) -> int:
        """Number of rows of these conversations, which must be prepared."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Every row is one conversation."""

    size: int
    complete: bool = True

    def rows(self, conversation: int) -> Sequence[int]:
        return (conversation,)

    def total(self, conversations: NDArray[np.int64]) -> int:
        return len(conversations)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The conversations of several sources, source after source."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None = None  # None: every conversation counts once
    seed: int = 0

    def epoch(self, number: int) -> NDArray[np.int64]:
        """As many conversations as there are, not shuffled; a source's share comes from repeated passes over it.

        Worked example, sizes 2 and 6 with equal weights: 4 and 4 conversations. The first source is read twice; the second
        gives 4, and its other 2 come first in the next epoch.
        """
        if self.weights is None:
            return np.arange(sum(self.sizes))
        source_draws, offset = [], 0
        for source, (size, share) in enumerate(zip(self.sizes, self.shares(sum(self.sizes)), strict=True)):
            source_draws.append(offset + self._drawn(source, size, number * share, (number + 1) * share))
            offset += size
        return np.concatenate(source_draws)

    def shares(self, total: int) -> list[int]:
        """Split `total` among the sources by weight, rounded so that the parts add up."""
        weights = self.sizes if self.weights is None else self.weights
        exact_counts = np.array(weights, np.float64) * (total / sum(weights))
        counts = np.floor(exact_counts).astype(int)
        counts[np.argsort(counts - exact_counts, kind="stable")[: total - counts.sum()]] += 1
        return [int(count) for count in counts]

    def _drawn(self, source: int, size: int, start: int, stop: int) -> NDArray[np.int64]:
        """Places `start` to `stop` of endless shuffled passes over a source."""
        passes = range(start // size, -(-stop // size)) if size else range(0)
        order = [np.random.default_rng([self.seed % 2**64, source, pass_index, MIX]).permutation(size) for pass_index in passes]
        return np.concatenate(order)[start - passes.start * size :][: stop - start] if order else np.zeros(0, np.int64)


class Epoch:
    """One epoch's rows in order, computed window by window."""

    def __init__(self, windows: Iterator[list[int]]) -> None:
        self.known: list[int] = []
        self._windows = windows

    def row(self, index: int) -> int | None:
        """The row at this index; None after the last."""
        while index >= len(self.known):
            window = next(self._windows, None)
            if window is None:
                return None
            self.known += window
        return self.known[index]

    def all(self) -> list[int]:
        """All rows, in order."""
        for window in self._windows:
            self.known += window
        return self.known


class Order:
    """All epochs, one after another. lengths: rows to group by length; None: no grouping."""

    def __init__(self, seed: int, mixture: Mixture, groups: Groups, lengths: Sequence[Encoded] | None) -> None:
        self.seed, self.mixture, self.groups, self.lengths = seed, mixture, groups, lengths
        self._epochs: dict[tuple[int, int], Epoch] = {}  # the epochs in use
        self._sizes: dict[int, int] = {}  # rows of epochs; without weights all epochs have the size of the first

    def epoch(self, number: int, batch: int) -> Epoch:
        """Epoch `number`, from 0, in batches of `batch` rows."""
        if (number, batch) not in self._epochs:
            while len(self._epochs) > 1:  # a batch spans two epochs at most, unless the data is smaller than a batch
                self._epochs.pop(next(iter(self._epochs)))
            rng, conversations = generator(self.seed, 1 + number), self.mixture.epoch(number)
            shuffled = conversations[rng.permutation(len(conversations))]
            rows = (row for conversation in shuffled for row in self.groups.rows(int(conversation)))
            self._epochs[number, batch] = Epoch(_windows(rows, batch, rng, self.lengths))
        return self._epochs[number, batch]

    def row(self, place: int, batch: int) -> int:
        """The row at this place in the concatenation of all epochs."""
        epoch_number = 0
        while True:
            size = self._size(epoch_number)
            if size is None or place < size:
                epoch = self.epoch(epoch_number, batch)
                if (row := epoch.row(place)) is not None:
                    return row
                size = self._sizes[self._size_key(epoch_number)] = len(epoch.known)
            if not size:
                raise UserError("no conversation has a supervised token to train on; raise data.max_length")
            skipped_epochs = 1 if self.mixture.weights else place // size
            epoch_number, place = epoch_number + skipped_epochs, place - skipped_epochs * size

    def _size(self, epoch_number: int) -> int | None:
        """Number of rows of an epoch; None while it is unknown."""
        key = self._size_key(epoch_number)
        if key not in self._sizes and self.groups.complete:
            self._sizes[key] = self.groups.total(self.mixture.epoch(epoch_number))
        return self._sizes.get(key)

    def _size_key(self, epoch_number: int) -> int:
        return epoch_number if self.mixture.weights else 0


def _windows(
    rows: Iterator[int], batch: int, rng: np.random.Generator, lengths: Sequence[Encoded] | None
) -> Iterator[list[int]]:
    while window := list(islice(rows, WINDOW * batch)):
        yield window if lengths is None else _grouped(window, batch, rng, lengths)


def _grouped(window: list[int], batch: int, rng: np.random.Generator, lengths: Sequence[Encoded]) -> list[int]:
    window = sorted(window, key=lambda row: len(lengths[row].token_ids))
    full_batches = len(window) // batch
    order = [row for b in rng.permutation(full_batches) for row in window[b * batch : (b + 1) * batch]]
    return order + window[full_batches * batch :]


def generator(seed: int, stream: int) -> np.random.Generator:
    """Independent random streams of one seed: stream 0 selects held-out conversations, 1 + e orders epoch e."""
    return np.random.default_rng([seed % 2**64, stream])
