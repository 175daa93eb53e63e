"""What drafters keep of accepted positions: those that one with its own KV cache has not processed yet (pending), or the last.

Shapes: S slots, B rows, R slots to reset, A pending positions, N tokens of one pass, H hidden, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.model import cached_layers
from drafttrain.model.drafter import Commit, RevertibleState
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import FINAL
from drafttrain.ops.commit import append_pending, keep_last, take_pending

IDLE = 32  # positions, beyond those of one proposal, that can wait while the drafter is idle


class PendingPositions:
    """Pending positions of each slot, in order.

    They are stored in tensors of `width` columns, made by the first `add`, plus one column for padding. The host only tracks
    an upper bound of a slot's count, so that adding and taking do not sync with the host.
    """

    def __init__(self, slots: int, draft_length: int, device: torch.device) -> None:
        self.step = draft_length + 1  # positions that one decode step can accept
        self.width = self.step + IDLE
        self.most = 0  # upper bound of a slot's count
        self.count_S = torch.zeros(slots, dtype=torch.long, device=device)
        self._columns: dict[Any, Tensor] = {}

    def clear(self, slot_R: Tensor) -> None:
        self.count_S.index_fill_(0, slot_R, 0)

    def has_room(self, columns: int) -> bool:
        return self.most + columns <= self.width

    def add(self, commit: Commit, slot_B: Tensor, empty: bool = False) -> None:
        """Append a commit; `has_room` must be true for its columns. empty: these slots have no pending positions."""
        columns = commit.token_BA.shape[1]
        new_columns: dict[Any, Tensor] = {"token": commit.token_BA, "next": commit.next_BA, **commit.hidden}
        for key, new_column in new_columns.items():
            if key not in self._columns:
                self._columns[key] = new_column.new_zeros(len(self.count_S), self.width + 1, *new_column.shape[2:])
        stores = [self._columns[key] for key in new_columns]
        append_pending(list(new_columns.values()), commit.count_B, slot_B, stores, self.count_S)
        self.most = max(self.most, columns) if empty else self.most + columns

    def take(self, slot_B: Tensor, columns: int | None = None, others: bool = False) -> Commit:
        """Remove and return the pending positions of these slots, left-aligned, then padding.

        columns: how many columns to return; None: the upper bound of the counts. others: further slots have pending positions.
        """
        columns = self.most if columns is None else columns
        taken, count_B = take_pending(list(self._columns.values()), slot_B, self.count_S, columns)
        self.most = self.most if others else 0
        (token_BA, next_BA), hidden = taken[:2], dict(zip(list(self._columns)[2:], taken[2:], strict=True))
        return Commit(token_BA, next_BA, hidden, count_B)

    def snapshot(self, slot_B: Tensor) -> PendingCopy:
        """A copy of these slots' pending positions."""
        return PendingCopy(self.count_S[slot_B], {key: x[slot_B] for key, x in self._columns.items()}, self.most)

    def restore(self, slot_B: Tensor, copy: PendingCopy) -> None:
        for key, x_BA in copy.columns.items():
            self._columns[key][slot_B] = x_BA
        self.count_S[slot_B], self.most = copy.count_B, copy.most


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy of some slots' pending positions."""

    count_B: Tensor
    columns: dict[Any, Tensor]
    most: int


def split_last(commit: Commit) -> tuple[Commit, Commit]:
    """(all but each row's last position, the last position alone); a row of count 0 has neither.

    Counts (3, 1, 0) become (2, 0, 0) and (1, 1, 0).
    """
    last_B1, nonempty_B = commit.last_B1, (commit.count_B > 0).long()
    last = Commit(commit.token_BA.gather(1, last_B1), commit.next_BA.gather(1, last_B1), commit.hidden_at(last_B1), nonempty_B)
    return replace(commit, count_B=commit.count_B - nonempty_B), last


def concatenated(first: Commit, second: Commit) -> Commit:
    """Each row's positions of `first`, then those of `second`, left-aligned."""
    A, M = first.token_BA.shape[1], second.token_BA.shape[1]
    column = torch.arange(A + M, device=first.count_B.device)
    count_B1 = first.count_B[:, None]
    order_BA = torch.where(column < count_B1, column, (A + column - count_B1).clamp_max(A + M - 1))

    def joined(a: Tensor, b: Tensor) -> Tensor:
        joined_rows = torch.cat([a, b], 1)
        index = order_BA if joined_rows.ndim == 2 else order_BA[..., None].expand(-1, -1, joined_rows.shape[-1])
        return joined_rows.gather(1, index)

    hidden = {k: joined(h, second.hidden[k]) for k, h in first.hidden.items()}
    token_BA, next_BA = joined(first.token_BA, second.token_BA), joined(first.next_BA, second.next_BA)
    return Commit(token_BA, next_BA, hidden, first.count_B + second.count_B)


def with_root(commit: Commit) -> tuple[Tensor, Tensor]:
    """(token_BN, root column [B]): each row's pending tokens, then its root.

    Pending `a b` with next tokens `b r` become `a b r`, root column 2.
    """
    root_B1 = commit.root_B[:, None]
    token_BN = torch.cat([commit.token_BA, torch.zeros_like(root_B1)], 1)
    return token_BN.scatter(1, commit.count_B[:, None], root_B1), commit.count_B


class CachedState(RevertibleState):
    """The state of a drafter with its own KV cache.

    Prompts are processed as they come, accepted positions at the next proposal. The last position of a slot stays pending
    until then, because the first draft follows from it.
    """

    def __init__(self, kv: KVCache, slots: int, draft_length: int, others: Sequence[KVCache] = ()) -> None:
        """others: further caches of the same lengths."""
        self.kv, self.own_caches = kv, [kv, *others]
        self.pending = PendingPositions(slots, draft_length, kv.device)

    @abstractmethod
    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        """Bring these positions into the cache. Columns past a row's count are padding."""

    @property
    def caches(self) -> list[KVCache]:
        return self.own_caches

    def reset(self, slot_R: Tensor) -> None:
        for kv in self.own_caches:
            kv.reset(slot_R)
        self.pending.clear(slot_R)

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        if not self.pending.has_room(commit.token_BA.shape[1]):
            self.catch_up(slot_B)
        self.pending.add(commit, slot_B)

    def observe_prompt(self, commit: Commit, slot_B: Tensor) -> None:
        if self.pending.most:
            commit = concatenated(self.pending.take(slot_B, 1, others=True), commit)
        self._consume_all_but_last(commit, slot_B)

    def catch_up(self, slot_B: Tensor) -> None:
        self._consume_all_but_last(self.take_pending(slot_B), slot_B)

    def _consume_all_but_last(self, commit: Commit, slot_B: Tensor) -> None:
        earlier, last = split_last(commit)
        chunks = [earlier] if self.kv.kept is None else list(earlier.split(cached_layers.AT_ONCE))
        for chunk in chunks:
            self.consume(chunk, slot_B)
            if self.kv.static_length is not None and chunk is not chunks[-1]:
                self.kv.use_static_length(self.kv.static_length + chunk.token_BA.shape[1])  # the next pass reads these too
        self.pending.add(last, slot_B, empty=True)

    def take_pending(self, slot_B: Tensor) -> Commit:
        """The pending positions of these slots, which are all slots in use; of fixed width in a captured step."""
        return self.pending.take(slot_B, self.pending.step if self.kv.static else None)

    def snapshot(self, slot_B: Tensor) -> Any:
        for kv in self.own_caches:
            kv.rows(slot_B)
        return [kv.mark() for kv in self.own_caches], self.pending.snapshot(slot_B)

    def restore(self, slot_B: Tensor, snapshot: Any) -> None:
        marks, pending = snapshot
        for kv, mark in zip(self.own_caches, marks, strict=True):
            kv.rows(slot_B)
            kv.back_to(mark)
        self.pending.restore(slot_B, pending)


class LastState(RevertibleState):
    """Per slot: the target's post-norm state at the last committed position (hidden_SH), and the root token (root_S).

    For drafters with `taps = Taps(final=True)`.
    """

    def __init__(self, slots: int, width: int, like: Tensor) -> None:
        """width: of the target's states. like: a weight of the drafter; states have its dtype and device."""
        self.hidden_SH = like.new_zeros(slots, width)
        self.root_S = torch.zeros(slots, dtype=torch.long, device=like.device)

    def reset(self, slot_R: Tensor) -> None:
        self.hidden_SH.index_fill_(0, slot_R, 0.0)
        self.root_S.index_fill_(0, slot_R, 0)

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        keep_last(self.hidden_SH, self.root_S, commit.hidden[FINAL], commit.next_BA, commit.count_B, slot_B)

    def snapshot(self, slot_B: Tensor) -> tuple[Tensor, Tensor]:
        return self.hidden_SH[slot_B], self.root_S[slot_B]

    def restore(self, slot_B: Tensor, snapshot: tuple[Tensor, Tensor]) -> None:
        self.hidden_SH[slot_B], self.root_S[slot_B] = snapshot
