"""Packs several conversations into one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

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
