"""What drafters with their own cache have seen accepted and not yet computed, and the part such drafters share.

Shapes: S slots, B rows, A staged positions, N tokens fed, H hidden, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.kv_cache import KVCache

IDLE = 32  # positions that can wait for an idle drafter beyond those of one proposal


class Staged:
    """Committed positions that a drafter has not consumed yet, per slot, in order.

    They lie in tensors of `width` columns and a last one for what is not kept, made at the first `add`. The host knows only
    how many a slot has at most, so that adding and taking them asks the device nothing.
    """

    def __init__(self, slots: int, draft_length: int, device: torch.device) -> None:
        self.step = draft_length + 1  # of one verification
        self.width, self.most = self.step + IDLE, 0
        self.count_S = torch.zeros(slots, dtype=torch.long, device=device)
        self._columns: dict[Any, Tensor] = {}

    def clear(self, slot_R: Tensor) -> None:
        self.count_S[slot_R] = 0

    def room(self, columns: int) -> bool:
        return self.most + columns <= self.width

    def add(self, commit: Commit, slot_B: Tensor, empty: bool = False) -> None:
        """Stage a commit behind what is there; `room` for its columns must be. empty: these slots have nothing staged."""
        columns = commit.token_BA.shape[1]
        column_A, held_B = torch.arange(columns, device=slot_B.device), self.count_S[slot_B]
        at_BA = torch.where(column_A < commit.count_B[:, None], held_B[:, None] + column_A, self.width)
        news: dict[Any, Tensor] = {"token": commit.token_BA, "next": commit.next_BA, **commit.hidden}
        for key, new in news.items():
            if key not in self._columns:
                self._columns[key] = new.new_zeros(len(self.count_S), self.width + 1, *new.shape[2:])
            self._columns[key][slot_B[:, None], at_BA] = new
        self.count_S[slot_B] = held_B + commit.count_B
        self.most = max(self.most, columns) if empty else self.most + columns

    def take(self, slot_B: Tensor, columns: int | None = None, others: bool = False) -> Commit:
        """The staged positions of these slots, left-aligned, with padding behind them; they are staged no more.

        columns: how many to give, whatever there is; None: as many as there are at most. others: further slots have some.
        """
        columns = self.most if columns is None else columns
        found = {key: x[slot_B, :columns] for key, x in self._columns.items()}
        count_B = self.count_S[slot_B]
        self.count_S[slot_B] = 0
        self.most = self.most if others else 0
        return Commit(found.pop("token"), found.pop("next"), found, count_B)

    def held(self, slot_B: Tensor) -> Held:
        """What these slots have staged, to be put back."""
        return Held(self.count_S[slot_B], {key: x[slot_B] for key, x in self._columns.items()}, self.most)

    def put_back(self, slot_B: Tensor, held: Held) -> None:
        for key, x_BA in held.columns.items():
            self._columns[key][slot_B] = x_BA
        self.count_S[slot_B], self.most = held.count_B, held.most


@dataclass(frozen=True, slots=True)
class Held:
    """A copy of some slots' staged positions."""

    count_B: Tensor
    columns: dict[Any, Tensor]
    most: int


def split_last(commit: Commit) -> tuple[Commit, Commit]:
    """(all but each row's last position, the last position alone); rows of count 0 have neither.

    Counts (3, 1, 0) become (2, 0, 0) and (1, 1, 0).
    """
    last_B1 = (commit.count_B - 1).clamp_min(0)[:, None]
    hidden = {k: h.gather(1, last_B1[..., None].expand(-1, -1, h.shape[-1])) for k, h in commit.hidden.items()}
    has_B = (commit.count_B > 0).long()
    last = Commit(commit.token_BA.gather(1, last_B1), commit.next_BA.gather(1, last_B1), hidden, has_B)
    return replace(commit, count_B=commit.count_B - has_B), last


def behind(first: Commit, second: Commit) -> Commit:
    """Each row's positions of `first`, then those of `second`, left-aligned."""
    A, M = first.token_BA.shape[1], second.token_BA.shape[1]
    column = torch.arange(A + M, device=first.count_B.device)
    held_B1 = first.count_B[:, None]
    order_BA = torch.where(column < held_B1, column, (A + column - held_B1).clamp_max(A + M - 1))

    def joined(a: Tensor, b: Tensor) -> Tensor:
        both = torch.cat([a, b], 1)
        index = order_BA if both.ndim == 2 else order_BA[..., None].expand(-1, -1, both.shape[-1])
        return both.gather(1, index)

    hidden = {k: joined(h, second.hidden[k]) for k, h in first.hidden.items()}
    token_BA, next_BA = joined(first.token_BA, second.token_BA), joined(first.next_BA, second.next_BA)
    return Commit(token_BA, next_BA, hidden, first.count_B + second.count_B)


def with_root(commit: Commit) -> tuple[Tensor, Tensor]:
    """(token_BN, last_B): each row's staged tokens with its root behind them, and the root's column.

    Staged `a b` whose next tokens are `b r` become `a b r`, root column 2.
    """
    root_B1 = commit.next_BA.gather(1, (commit.count_B - 1).clamp_min(0)[:, None])
    token_BN = torch.cat([commit.token_BA, torch.zeros_like(root_B1)], 1)
    return token_BN.scatter(1, commit.count_B[:, None], root_B1), commit.count_B


@dataclass
class OwnCache:
    kv: KVCache
    staged: Staged


class CachedDrafter(Drafter):
    """A drafter with a cache of its own: prompts are read as they come, accepted positions at the next proposal.

    The last position of a slot stays staged until a proposal needs it: the first draft follows from it.
    """

    @abstractmethod
    def consume(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        """Bring these positions into the cache; columns past a row's count are padding."""

    def reset(self, state: OwnCache, slot_R: Tensor) -> None:
        state.kv.reset(slot_R)
        state.staged.clear(slot_R)

    def observe(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        if not state.staged.room(commit.token_BA.shape[1]):
            self.absorb(state, slot_B)
        state.staged.add(commit, slot_B)

    def absorb(self, state: OwnCache, slot_B: Tensor) -> None:
        earlier, last = split_last(self.staged(state, slot_B))
        self.consume(state, earlier, slot_B)
        state.staged.add(last, slot_B, empty=True)

    def read(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        if state.staged.most:
            commit = behind(state.staged.take(slot_B, 1, others=True), commit)
        earlier, last = split_last(commit)
        self.consume(state, earlier, slot_B)
        state.staged.add(last, slot_B, empty=True)

    def mark(self, state: OwnCache, slot_B: Tensor) -> Any:
        return state.kv.lengths(slot_B), state.staged.held(slot_B)

    def rewind(self, state: OwnCache, slot_B: Tensor, mark: Any) -> None:
        length_B, held = mark
        state.kv.rows(slot_B)
        state.kv.crop(length_B)
        state.staged.put_back(slot_B, held)

    def caches(self, state: OwnCache) -> list[KVCache]:
        return [state.kv]

    @staticmethod
    def staged(state: OwnCache, slot_B: Tensor) -> Commit:
        """What is staged for all slots in use; where a graph may hold it, of one width whatever there is."""
        return state.staged.take(slot_B, state.staged.step if state.kv.static else None)
