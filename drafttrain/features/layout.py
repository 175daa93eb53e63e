"""Which conversation's states lie in which shard: a function of the conversations alone, whoever computes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
MOST = 2**28  # bytes of a shard
SHARDS = 64  # so that processes get like shares, and little is lost with a shard
LEAST = 2**13  # positions of a shard: enough for a pass of the target


def key_of(ids: Ids) -> str:
    """A conversation's name: of its token ids, which are all that a frozen target's states depend on."""
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Place:
    """Rows `start` to `stop` of a shard."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """texts: every conversation once, the shortest first; shards: how many each shard holds, in order."""

    texts: tuple[Ids, ...]
    shards: tuple[range, ...]

    @staticmethod
    def of(documents: Iterable[Ids], position_bytes: int) -> Layout:
        """Shards of `MOST` bytes, less where there would be fewer than `SHARDS`; one conversation is never divided."""
        named = {key_of(ids): ids for ids in documents}
        texts = [ids for _, ids in sorted(named.items(), key=lambda item: (len(item[1]), item[0]))]
        sizes = [len(ids) for ids in texts]
        few = max(sum(sizes) // SHARDS, LEAST)
        return Layout(tuple(texts), tuple(_groups(sizes, min(MOST // position_bytes, few))))

    def tokens(self, shard: int) -> int:
        return sum(len(self.texts[i]) for i in self.shards[shard])

    def passes(self, shard: int, positions: int) -> list[Sequence[Ids]]:
        """The shard's conversations, in order, in batches of no more positions than these, padding included."""
        found: list[list[Ids]] = []
        for i in self.shards[shard]:
            text = self.texts[i]  # the longest of its batch: they ascend
            if not found or (len(found[-1]) + 1) * len(text) > positions:
                found.append([])
            found[-1].append(text)
        return list(found)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where each conversation is, by its key."""
        found = {}
        for number, shard in enumerate(self.shards):
            start = 0
            for i in shard:
                stop = start + len(self.texts[i])
                found[key_of(self.texts[i])] = Place(number, start, stop)
                start = stop
        return found

    @cached_property
    def digest(self) -> str:
        """Of all conversations, in whichever order they came."""
        return hashlib.sha256("\n".join(sorted(self.places)).encode()).hexdigest()


def _groups(sizes: Sequence[int], most: int) -> Iterable[range]:
    start, held = 0, 0
    for i, size in enumerate(sizes):
        if held and held + size > most:
            yield range(start, i)
            start, held = i, 0
        held += size
    if held:
        yield range(start, len(sizes))
