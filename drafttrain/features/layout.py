"""Assigns conversations to shards. The layout depends only on the conversations, not on the processes that compute them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from drafttrain.model.images import FIRST

Ids = NDArray[Any]  # int32; int64 with ids of images
MAX_SHARD_BYTES = 2**28
MIN_SHARDS = 64  # so that processes get similar shares and a damaged shard costs little
MIN_SHARD_TOKENS = 2**13  # enough for one forward of the target


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
