"""Several conversations in one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from drafttrain.data.chat import Encoded, join


class Packed(Sequence[Encoded]):
    """Rows of several conversations, joined when they are asked for. members: which of `rows` are in each."""

    def __init__(self, rows: Sequence[Encoded], members: list[list[int]]) -> None:
        self.rows, self.members = rows, members

    @property
    def tokens(self) -> int:
        return sum(len(self.rows[i].token_ids) for members in self.members for i in members)

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
    """Rows of at most `length` tokens that hold all of these: the longest first, each into the fullest row with room for it.

    Best fit decreasing (Johnson 1974): at most 11/9 of the fewest rows possible, and close to them where many are short.
    chosen: which of `rows`, some perhaps several times; None: each once.
    """
    members: list[list[int]] = []
    having: dict[int, list[int]] = {}  # the rows with this much room
    rooms = 0  # a bit for every room that some row has
    lengths = {i: len(rows[i].token_ids) for i in (range(len(rows)) if chosen is None else chosen)}
    for i in sorted(lengths if chosen is None else chosen, key=lambda i: (-lengths[i], i)):
        size = lengths[i]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = having[room].pop()
            if not having[room]:
                rooms ^= 1 << room
        else:
            room, row = length, len(members)
            members.append([])
        members[row].append(i)
        having.setdefault(room - size, []).append(row)
        rooms |= 1 << (room - size)
    return Packed(rows, members)
