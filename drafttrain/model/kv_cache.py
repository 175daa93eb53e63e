"""The KV cache of one model: a committed prefix per slot, then scratch positions of the open tree.

Shapes: S slots, B rows in use, R any slots, h KV heads, D head width, N new positions, A accepted nodes.

Worked example: a slot with length 5 verifies a tree of 4 nodes. Node i is written at position 5 + i, whatever its
depth. If nodes 0, 1, 3 are accepted, `keep` moves positions 5, 6, 8 to 5, 6, 7 and the length becomes 8.

Other files use `KVCache` alone. It counts positions; a `Storage` holds keys and values (`model/kv_storage.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafttrain.model import kv_storage
from drafttrain.model.kv_storage import CacheRows, PageView, pages_for
from drafttrain.model.recurrent_state import RecurrentStates, States
from drafttrain.ops.kv_cache import advance


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in each row's sequence that the cache can go back to."""

    length_B: Tensor
    states: States  # of recurrent layers


class KVCache:
    """Keys and values of `layers` layers for `slots` requests of at most `max_len` positions.

    pages: None gives every slot its own pages from the start. A number is a pool that `reserve`, `fork` and `release`
    share out, so that requests of different lengths may need less than slots * max_len positions.
    `rows(slot_B)` chooses the slots of the following calls. `padding_slot` is one slot more, for rows that only fill a batch.
    Memory is allocated by `allocate`, or layer by layer at the first write in the dtype of what is written. Layers may differ
    in shape, and values in width from keys.

    By default the host follows every row's length. `use_static_length` fixes all shapes instead, for CUDA graphs.
    A model with recurrent layers keeps their `states` here too. Such a cache commits chains, and goes back only to a `Mark`.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        max_len: int,
        device: torch.device | str = "cpu",
        pages: int | None = None,
        recurrent: bool = False,
        kept: int | None = None,
        back: int | None = None,
    ) -> None:
        """recurrent: the model has recurrent layers. kept: only the last so many positions are read, so memory for more is not
        needed; None: all are. back: a slot goes back by so many positions at most; None: any."""
        self.layers, self.slots, self.max_len, self.kept, self.back = layers, slots, max_len, kept, back
        self.states = RecurrentStates(slots, torch.device(device)) if recurrent else None
        self.padding_slot = slots
        # for this file and its tests alone
        self.storage = kv_storage.STORAGE(layers, slots, max_len, torch.device(device), pages, kept)
        self._length_S = torch.zeros(slots + 1, dtype=torch.long, device=device)
        # rotary position of a slot's next position, less its index: not 0 after images that take fewer positions than tokens
        self.shift_S = torch.zeros(slots + 1, dtype=torch.long, device=device)
        self._host_lengths = [0] * (slots + 1)  # the same lengths on the host; out of date while shapes are static
        self._host_slots: list[int] = []  # of the rows in use, likewise
        self._static_length: int | None = None
        self.rows(torch.arange(slots, device=device))

    # -- rows and lengths

    def rows(self, slot_B: Tensor) -> None:
        """Choose the slots in use; row b of every later call belongs to slot `slot_B[b]`."""
        in_order = False
        if self._static_length is None:
            S = self.slots
            in_order = len(slot_B) == S and bool((slot_B == torch.arange(S, device=slot_B.device)).all())
            self._host_slots = slot_B.tolist()
        self._refresh(slot_B, self._length_S[slot_B])
        self.storage.select(self._rows, in_order)
        if self.states is not None:
            self.states.rows(slot_B)

    def _refresh(self, slot_B: Tensor, length_B: Tensor) -> None:
        if self._static_length is not None:
            self._rows = CacheRows(slot_B, length_B, self._static_length, False, True)
            return
        lengths = [self._host_lengths[slot] for slot in self._host_slots]
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        self._rows = CacheRows(slot_B, length_B, longest, longest == shortest, False)

    @property
    def device(self) -> torch.device:
        return self._length_S.device

    @property
    def capacity(self) -> int:
        """Positions that a slot has memory for."""
        return self.storage.capacity

    @property
    def slot_B(self) -> Tensor:
        """Each row's slot."""
        return self._rows.slot_B

    @property
    def length_B(self) -> Tensor:
        """Each row's committed positions."""
        return self._rows.length_B

    @property
    def longest(self) -> int:
        """Upper bound on every row's length: the static length, otherwise the longest row's."""
        return self._rows.longest

    @property
    def equal_lengths(self) -> bool:
        """Whether every row is known to have `longest` positions."""
        return self._rows.equal_lengths

    @property
    def shift_B(self) -> Tensor:
        """Each row's shift of rotary positions."""
        return self.shift_S[self.slot_B]

    def add_shift(self, shift_B: Tensor) -> None:
        """Shift the rotary positions of all later positions of the rows."""
        self.shift_S[self.slot_B] += shift_B

    def lengths(self, slot_R: Tensor) -> Tensor:
        """Committed positions of any slots, [R]."""
        return self._length_S[slot_R]

    # -- static shapes

    @property
    def static(self) -> bool:
        """Whether shapes are fixed and nothing here syncs with the host."""
        return self._static_length is not None

    @property
    def static_length(self) -> int | None:
        """Upper bound on every row's length, set by `use_static_length`; None: the host follows the lengths."""
        return self._static_length

    def use_static_length(self, length: int | None, new: int = 0) -> None:
        """Fix the shapes: no row exceeds `length` positions, or the capacity less the `new` ones that one pass may add.

        None: the host follows lengths again, from the next `rows`. It knows the length of a slot that is `reset` then.
        """
        self._static_length = None if length is None else min(length, self.storage.capacity - new)
        if self._static_length is not None:
            self._rows = replace(self._rows, longest=self._static_length, equal_lengths=False, static=True)

    def ensure_room(self, nodes: int) -> None:
        """Raise ValueError when `nodes` more positions do not fit every row; a static length leaves room already."""
        if not self.static and self.longest + nodes > self.max_len:
            raise ValueError(
                f"{self.longest} committed + {nodes} new positions exceed the cache's {self.max_len}; raise max_len"
            )

    # -- keys and values

    def allocate(
        self,
        heads: int,
        width: int,
        dtype: torch.dtype,
        value_width: int | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Allocate these layers' memory now, in one piece. value_width: None: that of the keys. layers: None: all."""
        layers = range(self.layers) if layers is None else layers
        self.storage.allocate(layers, heads, width, width if value_width is None else value_width, dtype)

    def append(self, layer: int, k_BhND: Tensor, v_BhND: Tensor, earlier: int = 0) -> None:
        """Write N scratch positions after each row's prefix and its `earlier` scratch positions."""
        self.storage.write(layer, self._rows, k_BhND, v_BhND, earlier)

    def read(self, layer: int, nodes: int) -> tuple[Tensor, Tensor]:
        """Keys and values of prefixes and `nodes` scratch positions, [B, h, longest + nodes, D]; no more than the capacity.

        Columns past a row's own length + nodes hold old data: the caller's mask must hide them.
        """
        return self.storage.read(layer, self.longest + nodes)

    def read_row(self, layer: int, row: int, nodes: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one row's prefix and `nodes` scratch positions, [h, length + nodes, D]; the host knows lengths.

        A view of the cache where the row's memory is in one piece.
        """
        assert not self.static, "with a static length the host does not know the rows' lengths"
        slot = self._host_slots[row]
        positions = self._host_lengths[slot] + nodes
        assert positions <= self.storage.capacity, f"{positions} positions exceed the storage's {self.storage.capacity}"
        return self.storage.read_row(layer, slot, positions)

    def page_view(self) -> PageView | None:
        """The pages of the rows in use, for operators that address them; None: the storage offers none, use `read`."""
        return self.storage.view(self._rows)

    def keep(self, path_BA: Tensor, count_B: Tensor) -> None:
        """Commit the scratch positions named by `path_BA` (tree nodes, root first), the first `count_B` of each row; drop the
        rest.

        With recurrent layers the tree is a chain.
        """
        self.storage.move(self._rows, path_BA, count_B)
        self.advance(count_B)

    def advance(self, count_B: Tensor) -> None:
        """Commit the first `count_B` scratch positions of each row. Nothing moves."""
        counts = None if self.static else count_B.tolist()
        if self.states is not None:
            self.states.commit(count_B, counts)
        self._advance(count_B, counts)

    def extend(self, counts: Sequence[int]) -> None:
        """As `advance`, for counts that the host knows: nothing is read from the device."""
        assert not self.static, "with a static length the host does not know the rows' lengths"
        count_B = torch.tensor(counts, device=self.device)
        if self.states is not None:
            self.states.commit(count_B, counts)
        self._advance(count_B, counts)

    def _advance(self, count_B: Tensor, added: Sequence[int] | None) -> None:
        length_B = advance(self.length_B, count_B, self.slot_B, self._length_S)
        for slot, count in zip(self._host_slots, added or (), strict=added is not None):
            self._host_lengths[slot] += count
        self._refresh(self.slot_B, length_B)

    def mark(self, count_B: Tensor | None = None) -> Mark:
        """The place after the first `count_B` scratch positions of each row; None: after the committed ones."""
        if count_B is None:
            return Mark(self.length_B, {} if self.states is None else self.states.take(self.slot_B))
        return Mark(self.length_B + count_B, {} if self.states is None else self.states.after(count_B))

    def back_to(self, mark: Mark) -> None:
        """Drop the positions after the mark. The rows are those for which it was made."""
        if self.states is not None:
            self.states.put(self.slot_B, mark.states)
        self._crop(mark.length_B)

    @property
    def croppable(self) -> bool:
        """Whether it can go back to any length."""
        return self.states is None

    def crop(self, length_B: Tensor) -> None:
        """Set the rows' lengths: positions past them are dropped."""
        assert self.croppable, "recurrent states cannot go back to any length; use `mark` and `back_to`"
        self._crop(length_B)

    def _crop(self, length_B: Tensor) -> None:
        self._length_S.index_copy_(0, self.slot_B, length_B)
        if not self.static:
            for slot, length in zip(self._host_slots, length_B.tolist(), strict=True):
                self._set_host_length(slot, length)
        self._refresh(self.slot_B, length_B)

    def _set_host_length(self, slot: int, length: int) -> None:
        assert self.back is None or self._host_lengths[slot] - length <= self.back, "the positions before are overwritten"
        self._host_lengths[slot] = length

    def crop_slot(self, slot: int, length: int) -> None:
        """As `crop`, for one slot, whether it is in use or not."""
        assert self.croppable, "recurrent states cannot go back to any length; compute the slot's positions again"
        self._length_S[slot] = length
        if not self.static:
            self._set_host_length(slot, length)
        self._refresh(self.slot_B, self._length_S[self.slot_B])

    def reset(self, slot_R: Tensor) -> None:
        """Empty these slots for new requests; they keep the memory that they have reserved."""
        for counter_S in (self._length_S, self.shift_S):
            counter_S.index_fill_(0, slot_R, 0)
        if self.states is not None:
            self.states.clear(slot_R)
        if not self.static:
            for slot in slot_R.tolist():
                self._host_lengths[slot] = 0
        self._refresh(self.slot_B, self._length_S[self.slot_B])

    # -- memory of the slots

    @property
    def bytes_per_position(self) -> int:
        """Of the keys and values that are allocated."""
        return self.storage.bytes_per_position

    @property
    def state_bytes(self) -> int:
        """Of a slot's recurrent states, whatever its length."""
        return 0 if self.states is None else self.states.bytes_per_slot

    @property
    def pages(self) -> int:
        """Pages in all."""
        return self.storage.pages

    @property
    def free_pages(self) -> int:
        """Pages of the pool that no slot has reserved; 0 without a pool."""
        return self.storage.free_pages

    def pages_needed(self, positions: int, samples: int = 1, prompt: int = 0) -> int:
        """Pages for so many sequences of `positions` positions that share the whole pages of a prompt."""
        page = self.storage.page
        return samples * pages_for(positions, page) - (samples - 1) * (prompt // page)

    def reserve(self, slot: int, positions: int) -> None:
        """Give an empty slot memory for this many positions. Raises ValueError when the pool has too few pages."""
        self.storage.reserve(slot, positions)
        self._empty(slot)
        self.rows(self.slot_B)

    def fork(self, source: int, slot: int, positions: int) -> None:
        """As `reserve`; the slot begins with the committed prefix of the source. Whole pages of a pool are shared."""
        prefix = self._host_lengths[source]
        self.storage.fork(source, slot, prefix, positions)
        if self.states is not None:
            self.states.copy(source, slot)
        self._length_S[slot] = self._host_lengths[slot] = prefix
        self.shift_S[slot] = self.shift_S[source]
        self.rows(self.slot_B)

    def release(self, slot: int) -> None:
        """Take back the slot's memory and empty it; pages that other slots share stay with them."""
        self.storage.release(slot)
        self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._length_S[slot] = self.shift_S[slot] = self._host_lengths[slot] = 0
        if self.states is not None:
            self.states.clear(torch.tensor([slot], device=self.device))
