"""Where a KV cache's keys and values are: the interface of a storage, and the paged storage.

Shapes: L layers, S slots, B rows in use, h KV heads, Q pages, P positions, D head width, N new positions, A accepted nodes.

Position p of a slot is in page table[slot, p // PAGE]. With pages of 4 and the table row (7, 2), the 5 positions of a prefix
are in page 7 and in the first position of page 2; the next position that is written is the second one of page 2.

A storage that keeps the last positions alone gives a slot fewer pages than its table has entries, in turn. With 3 pages, the
table row is (0, 1, 2, 0, 1, ...): positions 12 to 15 overwrite positions 0 to 3. Whoever reads must mask what is overwritten,
as a sliding window does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafttrain.ops.kv_cache import flat, kv_keep
from drafttrain.ops.tree_attention import tree_attention

PAGE = 32  # positions
ARRIVALS = 1024  # counters of `tree_attention`: one for each block of rows, KV head and batch row


@dataclass(frozen=True, slots=True)
class CacheRows:
    """The rows in use and their committed positions."""

    slot_B: Tensor  # each row's slot
    length_B: Tensor  # each row's committed positions
    longest: int  # no row has more; with a static length that length, otherwise the longest row's
    equal_lengths: bool  # every row has `longest` positions; False where the host does not know
    static: bool  # shapes are fixed, and nothing syncs with the host


@dataclass(frozen=True, slots=True)
class PageView:
    """A storage's pages, for operators that read and write them in place."""

    layers: list[tuple[Tensor, Tensor] | None]  # each layer's keys and values, [Q, PAGE, h, D]; None before its first write
    stores: list[Tensor]  # [L, 2, Q, PAGE, h, D]; one tensor where all layers were allocated together
    table_BQ: Tensor  # each row's pages
    rows: CacheRows
    arrived: Tensor | None = None  # counters for `tree_attention`

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, [Q, PAGE, h, D]."""
        keys_values = self.layers[number]
        assert keys_values is not None, "storage is allocated at the first write, or by allocate"
        return keys_values

    @property
    def store(self) -> Tensor:
        """All layers' keys and values, [L, 2, Q, PAGE, h, D], where the layers have one shape."""
        assert len(self.stores) == 1, "storage is allocated at the first write, or by allocate"
        return self.stores[0]

    def attend(
        self,
        layer: int,
        q_BNhD: Tensor,
        bits_BNw: Tensor,
        position_BN: Tensor,
        scale: float,
        window: int | None = None,
        earlier: int = 0,
        cap: float | None = None,
        sinks_h: Tensor | None = None,
        first: int | None = None,
    ) -> Tensor:
        """[B, N, h D]: attention of nodes whose keys and values are written; arguments as for `tree_attention`.

        first: numbers of a key that are its value, where the layer has no values.
        """
        keys, values = self.layer(layer)
        if first is not None:
            values = keys[..., :first]
        bound = min(self.rows.longest + earlier + q_BNhD.shape[1], self.table_BQ.shape[1] * keys.shape[1])
        cache_args = (self.table_BQ, self.rows.length_B, bits_BNw, position_BN)
        return tree_attention(q_BNhD, keys, values, *cache_args, scale, window, bound, earlier, self.arrived, cap, sinks_h)


class Storage(Protocol):
    """Holds keys and values by layer, slot and position. It does not know which positions count: `KVCache` does."""

    page: int  # positions of a page; a storage without pages has one page per slot
    pages: int  # pages in all
    capacity: int  # positions that a slot has at most

    @property
    def free_pages(self) -> int:
        """Pages that no slot has reserved."""
        ...

    @property
    def bytes_per_position(self) -> int:
        """Of the keys and values of all layers that have memory."""
        ...

    def select(self, rows: CacheRows, in_order: bool) -> None:
        """Name the rows of the following calls. in_order: row b is slot b, for all slots."""
        ...

    def allocate(self, layers: Sequence[int], heads: int, width: int, value_width: int, dtype: torch.dtype) -> None:
        """Reserve the memory of those of these layers that have none. width: of keys."""
        ...

    def write(self, layer: int, rows: CacheRows, k_BhND: Tensor, v_BhND: Tensor, earlier: int) -> None:
        """Write N positions from each row's length + earlier on; allocates the layer's memory at its first call."""
        ...

    def read(self, layer: int, positions: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first positions of each row, [B, h, P, D]."""
        ...

    def read_row(self, layer: int, slot: int, positions: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a slot's first positions, [h, P, D]; views where the storage allows it."""
        ...

    def view(self, rows: CacheRows) -> PageView | None:
        """The pages, for operators that read and write them in place; None: callers use `read` and `write`."""
        ...

    def move(self, rows: CacheRows, path_BA: Tensor, count_B: Tensor) -> None:
        """Move position length + path[a] to length + a, for the first `count_B` entries of each path."""
        ...

    def reserve(self, slot: int, positions: int) -> None:
        """Give an empty slot memory for this many positions. Raises ValueError where too little is free."""
        ...

    def fork(self, source: int, slot: int, prefix: int, positions: int) -> None:
        """As `reserve`; the slot's first `prefix` positions are those of the source, shared or copied."""
        ...

    def release(self, slot: int) -> None:
        """Take back the slot's memory; another slot that shares it keeps it."""
        ...


class PagedStorage:
    """Pages of `PAGE` positions, in one tensor for all layers that are allocated together; a table names each slot's pages.

    Values of another width than the keys follow them in the same row, so that a position moves with one copy.
    """

    def __init__(
        self, layers: int, slots: int, max_len: int, device: torch.device, pages: int | None, kept: int | None = None
    ) -> None:
        """kept: of each slot at least the last so many positions are kept, older ones are overwritten; None: all are. A pool
        keeps all."""
        self.slots, self.max_len, self.page, self._device = slots, max_len, PAGE, device
        self._slot_pages = pages_for(max_len)
        self.capacity = self._slot_pages * PAGE
        pages_per_slot = self._slot_pages if kept is None else min(self._slot_pages, pages_for(kept) + 1)
        self.pages = slots * pages_per_slot if pages is None else pages
        self.pooled = pages is not None
        self._whole = not self.pooled and pages_per_slot == self._slot_pages  # a slot's pages are one run of the store
        # an entry without a page names the last page, which belongs to no slot
        self.table_SQ = torch.full((slots + 1, self._slot_pages), self.pages, device=device)
        if not self.pooled:
            first_S1 = pages_per_slot * torch.arange(slots, device=device)[:, None]
            self.table_SQ[:slots] = first_S1 + torch.arange(self._slot_pages, device=device) % pages_per_slot
        self.free = list(range(self.pages - 1, -1, -1)) if self.pooled else []
        self.owned: list[list[int]] = [[] for _ in range(slots)]  # each slot's pages, where they come from a pool
        self.uses = [0] * self.pages  # slots that have reserved each page of a pool
        # the cache's own, because steps over one cache never run at once; graphs know its address (docs/decisions/024)
        self.arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        # one per call of `allocate`: [layers, 2, Q, PAGE, h, D], or [layers, 1, Q, PAGE, h, key width + value width]
        self.stores: list[Tensor] = []
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers  # keys and values of each, [Q, PAGE, h, D]

    @property
    def free_pages(self) -> int:
        return len(self.free)

    @property
    def bytes_per_position(self) -> int:
        return sum(store.nbytes for store in self.stores) // ((self.pages + 1) * PAGE)

    def select(self, rows: CacheRows, in_order: bool) -> None:
        self._table_BQ = self.table_SQ[rows.slot_B]
        self._adjacent = in_order and self._whole  # row b's pages are the b-th run of the store: it is read as a view

    def allocate(self, layers: Sequence[int], heads: int, width: int, value_width: int, dtype: torch.dtype) -> None:
        unallocated = [layer for layer in layers if self._layers[layer] is None]
        if not unallocated:
            return
        equal_widths = width == value_width
        shape = (
            (2, self.pages + 1, PAGE, heads, width) if equal_widths else (1, self.pages + 1, PAGE, heads, width + value_width)
        )
        store = torch.zeros(len(unallocated), *shape, dtype=dtype, device=self._device)
        self.stores.append(store)
        for index, layer in enumerate(unallocated):
            layer_store = store[index]
            self._layers[layer] = (
                (layer_store[0], layer_store[1]) if equal_widths else (layer_store[0, ..., :width], layer_store[0, ..., width:])
            )

    def write(self, layer: int, rows: CacheRows, k_BhND: Tensor, v_BhND: Tensor, earlier: int) -> None:
        N = k_BhND.shape[2]
        if self._layers[layer] is None:
            self.allocate([layer], k_BhND.shape[1], k_BhND.shape[3], v_BhND.shape[3], k_BhND.dtype)
        keys_values = self._layers[layer]
        assert keys_values is not None
        keys, values = keys_values
        if self._adjacent and rows.equal_lengths:
            for pool, new_BhND in ((keys, k_BhND), (values, v_BhND)):
                self._runs(pool)[:, rows.longest + earlier : rows.longest + earlier + N] = new_BhND.transpose(1, 2)
            return
        index_BN = flat(self._table_BQ, rows.length_B[:, None] + torch.arange(earlier, earlier + N, device=k_BhND.device), PAGE)
        for pool, new_BhND in ((keys, k_BhND), (values, v_BhND)):
            pool.view(pool.shape[0] * PAGE, *pool.shape[2:])[index_BN] = new_BhND.transpose(1, 2)

    def read(self, layer: int, positions: int) -> tuple[Tensor, Tensor]:
        keys_values = self._layers[layer]
        assert keys_values is not None, "storage is allocated at the first write, or by allocate"
        return self._gathered(keys_values[0], positions), self._gathered(keys_values[1], positions)

    def _gathered(self, pool: Tensor, positions: int) -> Tensor:
        if self._adjacent:
            return self._runs(pool)[:, :positions].transpose(1, 2)
        return pool[self._table_BQ[:, : pages_for(positions)]].flatten(1, 2)[:, :positions].transpose(1, 2)

    def read_row(self, layer: int, slot: int, positions: int) -> tuple[Tensor, Tensor]:
        keys_values, pages = self._layers[layer], pages_for(positions)
        assert keys_values is not None, "storage is allocated at the first write, or by allocate"
        first = self._adjacent_from(slot, pages)
        page_index = self.table_SQ[slot, :pages] if first is None else slice(first, first + pages)
        keys, values = (pool[page_index].flatten(0, 1)[:positions].transpose(0, 1) for pool in keys_values)
        return keys, values

    def _adjacent_from(self, slot: int, pages: int) -> int | None:
        """The slot's first page, if its first pages are adjacent in the store."""
        if self._whole:
            return slot * self._slot_pages if slot < self.slots and pages <= self._slot_pages else None
        slot_pages = self.owned[slot][:pages] if slot < self.slots else []
        return (
            slot_pages[0]
            if len(slot_pages) == pages > 0 and slot_pages == list(range(slot_pages[0], slot_pages[0] + pages))
            else None
        )

    def _runs(self, pool: Tensor) -> Tensor:
        """[S, P, h, D] view of pages in the order of the slots."""
        return pool[: self.pages].view(self.slots, self.capacity, *pool.shape[2:])

    def view(self, rows: CacheRows) -> PageView:
        return PageView(self._layers, self.stores, self._table_BQ, rows, self.arrived)

    def move(self, rows: CacheRows, path_BA: Tensor, count_B: Tensor) -> None:
        for store in self.stores:
            kv_keep(store, self._table_BQ, rows.length_B, path_BA, count_B)

    def reserve(self, slot: int, positions: int) -> None:
        if self.pooled:
            self._own(slot, [], positions)

    def fork(self, source: int, slot: int, prefix: int, positions: int) -> None:
        if not self.pooled:
            filled = pages_for(prefix)
            for store in self.stores:
                store[:, :, self.table_SQ[slot, :filled]] = store[:, :, self.table_SQ[source, :filled]]
            return
        full_pages = prefix // PAGE
        self._own(slot, self.owned[source][:full_pages], positions)
        for store in self.stores if prefix % PAGE else ():  # a page that is not full is copied
            store[:, :, self.owned[slot][full_pages]] = store[:, :, self.owned[source][full_pages]]

    def _own(self, slot: int, shared: list[int], positions: int) -> None:
        """Give the slot these pages and as many more as it needs."""
        new_pages = pages_for(positions) - len(shared)
        if new_pages > len(self.free) or positions > self.max_len:
            raise ValueError(
                f"{positions} positions need {new_pages} pages of {PAGE}; {len(self.free)} of {self.pages} are free, "
                f"a slot holds {self.max_len} positions"
            )
        slot_pages = shared + [self.free.pop() for _ in range(new_pages)]
        for page in slot_pages:
            self.uses[page] += 1
        self.owned[slot] = slot_pages
        self.table_SQ[slot] = self.pages
        self.table_SQ[slot, : len(slot_pages)] = torch.tensor(slot_pages, device=self._device)

    def release(self, slot: int) -> None:
        if not self.pooled:
            return
        for page in self.owned[slot]:
            self.uses[page] -= 1
            if self.uses[page] == 0:
                self.free.append(page)
        self.owned[slot] = []
        self.table_SQ[slot] = self.pages


def pages_for(positions: int, page: int = PAGE) -> int:
    """Pages that hold so many positions."""
    return -(-positions // page)


STORAGE: Callable[[int, int, int, torch.device, int | None, int | None], Storage] = PagedStorage  # every new cache gets one
