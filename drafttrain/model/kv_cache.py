"""The paged KV cache of one model: a committed prefix per slot, then scratch positions of the open tree.

Shapes: L layers, S slots, B rows in use, h KV heads, Q pages, P positions, D head width, N tree nodes, A accepted nodes.

Worked example: a slot with length 5 verifies a tree of 4 nodes. Node i is written at position 5 + i, whatever its
depth. If nodes 0, 1, 3 are accepted, `keep` moves positions 5, 6, 8 to 5, 6, 7 and the length becomes 8.

Position p of a slot lies in page table[slot, p // PAGE]. With pages of 4 and the table row (7, 2), the example's
prefix lies in page 7 and the first position of page 2; node 0 goes to the second position of page 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops.kv_keep import flat, kv_keep

PAGE = 32  # positions


class KVCache:
    """Keys and values of `layers` layers for `slots` requests of at most `max_len` positions.

    pages: None gives every slot its own pages from the start. A number is a pool that `reserve` and `release` share out,
    so that requests of different lengths may need less than slots * max_len positions.
    Storage is reserved whole, by `allocate` or at the first write, in the dtype and on the device of what is written.
    `rows(slot_B)` chooses the slots that the following writes and keeps concern. One slot more than `slots`, `nobody`, is for
    rows that only fill up a batch.

    bound: None while the host follows every row's length. A number, set from outside, stands for all of them: no row will
    pass it, and nothing here then asks the device, so that a CUDA graph can hold what is done; lengths live there alone.
    """

    def __init__(
        self, layers: int, slots: int, max_len: int, device: torch.device | str = "cpu", pages: int | None = None
    ) -> None:
        self.layers, self.slots, self.max_len, self.page = layers, slots, max_len, PAGE
        self.nobody = slots
        self.bound: int | None = None
        self.length_S = torch.zeros(slots + 1, dtype=torch.long, device=device)
        self._lengths = [0] * (slots + 1)  # the same on the host, which plans by them without asking the device
        self.per_slot = pages_for(max_len)
        self.pages = slots * self.per_slot if pages is None else pages
        self._pooled = pages is not None
        # an entry without a page names the last one, which nobody owns
        self.table_SQ = torch.full((slots + 1, self.per_slot), self.pages, device=device)
        if not self._pooled:
            self.table_SQ[:slots] = torch.arange(self.pages, device=device).view(slots, self.per_slot)
        self._free = list(range(self.pages - 1, -1, -1)) if self._pooled else []
        self._owned: list[list[int]] = [[] for _ in range(slots)]
        self._uses = [0] * self.pages
        self._stores: list[Tensor] = []  # each [layers or 1, 2, Q, PAGE, h, D]; one, unless layers differ in shape
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers  # keys and values of each, [Q, PAGE, h, D]
        self.rows(torch.arange(slots, device=device))

    def rows(self, slot_B: Tensor) -> None:
        """Name the slots in use; row b of every later call belongs to slot `slot_B[b]`."""
        self.slot_B = slot_B
        if self.bound is not None:
            self._whole, self.longest, self.even = False, self.bound, False
            self.table_BQ, self.length_B = self.table_SQ[slot_B], self.length_S[slot_B]
            return
        all_slots = len(slot_B) == self.slots and bool((slot_B == torch.arange(self.slots, device=slot_B.device)).all())
        self._whole = all_slots and not self._pooled  # row b's pages are the b-th run of the store
        self.table_BQ = self.table_SQ[slot_B]
        self._slots = slot_B.tolist()
        self._refresh()

    def _refresh(self) -> None:
        self.length_B = self.length_S[self.slot_B]
        if self.bound is not None:
            return
        lengths = [self._lengths[slot] for slot in self._slots]
        self.longest = max(lengths, default=0)
        self.even = min(lengths, default=0) == self.longest

    def _set(self, length_B: Tensor) -> None:
        """New lengths of the rows in use."""
        self.length_S[self.slot_B] = length_B
        if self.bound is None:
            for slot, length in zip(self._slots, length_B.tolist(), strict=True):
                self._lengths[slot] = length
        self._refresh()

    def reset(self, slot_R: Tensor) -> None:
        """Empty these slots for new requests; their pages stay theirs."""
        self.length_S[slot_R] = 0
        if self.bound is None:
            for slot in slot_R.tolist():
                self._lengths[slot] = 0
        self._refresh()

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def reserve(self, slot: int, positions: int, shared: int | None = None) -> None:
        """Give an empty slot of a pooled cache pages for so many positions.

        shared: a slot whose committed prefix it begins with. Whole pages are then the same pages, the last, partial one
        is copied; the prefix counts as committed. Raises ValueError when the pool has too few pages.
        """
        prefix = 0 if shared is None else self._lengths[shared]
        common = [] if shared is None else self._owned[shared][: prefix // PAGE]
        needed = pages_for(positions) - len(common)
        if needed > len(self._free) or positions > self.max_len:
            raise ValueError(
                f"{positions} positions need {needed} pages of {PAGE}; {len(self._free)} of {self.pages} are free, "
                f"a slot holds {self.max_len} positions"
            )
        own = common + [self._free.pop() for _ in range(needed)]
        for page in own:
            self._uses[page] += 1
        self._owned[slot] = own
        self.table_SQ[slot] = self.pages
        self.table_SQ[slot, : len(own)] = torch.tensor(own, device=self.table_SQ.device)
        if shared is not None and prefix % PAGE:
            for store in self._stores:
                store[:, :, own[len(common)]] = store[:, :, self._owned[shared][len(common)]]
        self.length_S[slot] = self._lengths[slot] = prefix
        self.rows(self.slot_B)

    def release(self, slot: int) -> None:
        """Take a pooled slot's pages back; those it shared stay with the others that use them."""
        for page in self._owned[slot]:
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._free.append(page)
        self._owned[slot] = []
        self.table_SQ[slot], self.length_S[slot], self._lengths[slot] = self.pages, 0, 0

    def copy(self, source: int, slot: int) -> None:
        """Give a slot with its own pages the committed prefix of another."""
        pages = pages_for(self._lengths[source])
        for store in self._stores:
            store[:, :, self.table_SQ[slot, :pages]] = store[:, :, self.table_SQ[source, :pages]]
        self.length_S[slot] = self._lengths[slot] = self._lengths[source]
        self._refresh()

    def room(self, nodes: int) -> None:
        """Raise ValueError when `nodes` more positions do not fit every row in use; who sets a bound sees to that."""
        if self.bound is None and self.longest + nodes > self.max_len:
            raise ValueError(
                f"{self.longest} committed + {nodes} new positions exceed the cache's {self.max_len}; raise max_len"
            )

    @property
    def store(self) -> Tensor:
        """[L, 2, Q, PAGE, h, D] of all layers, where they have one shape."""
        assert len(self._stores) == 1, "storage is allocated at the first write, or by allocate"
        return self._stores[0]

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one layer, [Q, PAGE, h, D], for operations that read pages themselves."""
        both = self._layers[number]
        assert both is not None, "storage is allocated at the first write, or by allocate"
        return both

    def allocate(self, heads: int, width: int, dtype: torch.dtype) -> None:
        """Reserve all layers' storage now."""
        for number in range(self.layers):
            self._storage(number, heads, width, dtype)

    def write(self, layer: int, k_BhND: Tensor, v_BhND: Tensor) -> tuple[Tensor, Tensor]:
        """Put N scratch positions after each row's prefix; return all keys and values [B, h, longest + N, D].

        Columns past a row's own length + N hold old data: the caller's mask must hide them.
        """
        self.put(layer, k_BhND, v_BhND)
        keys, values = self.layer(layer)
        P = self.longest + k_BhND.shape[2]
        return self._read(keys, P), self._read(values, P)

    def put(self, layer: int, k_BhND: Tensor, v_BhND: Tensor) -> None:
        """`write` for readers of pages: nothing is returned."""
        N = k_BhND.shape[2]
        keys, values = self._storage(layer, k_BhND.shape[1], k_BhND.shape[3], k_BhND.dtype)
        if self._whole and self.even:
            for pool, new_BhND in ((keys, k_BhND), (values, v_BhND)):
                self._runs(pool)[:, self.longest : self.longest + N] = new_BhND.transpose(1, 2)
            return
        at_BN = flat(self.table_BQ, self.length_B[:, None] + torch.arange(N, device=k_BhND.device), PAGE)
        keys.flatten(0, 1)[at_BN], values.flatten(0, 1)[at_BN] = k_BhND.transpose(1, 2), v_BhND.transpose(1, 2)

    def _runs(self, pool: Tensor) -> Tensor:
        """[S, P, h, D] view of a store in which every slot's pages lie together."""
        return pool[: self.pages].view(self.slots, self.per_slot * PAGE, *pool.shape[2:])

    def _read(self, pool: Tensor, positions: int) -> Tensor:
        if self._whole:
            return self._runs(pool)[:, :positions].transpose(1, 2)
        return pool[self.table_BQ[:, : pages_for(positions)]].flatten(1, 2)[:, :positions].transpose(1, 2)

    def _storage(self, layer: int, heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        both = self._layers[layer]
        if both is None:
            shape = (2, self.pages + 1, PAGE, heads, width)
            if not self._stores:
                self._stores.append(torch.zeros(self.layers, *shape, dtype=dtype, device=self.length_S.device))
            elif self._stores[0].shape[1:] != shape:
                self._stores.append(torch.zeros(1, *shape, dtype=dtype, device=self.length_S.device))
            store = self._stores[0][layer] if self._stores[0].shape[1:] == shape else self._stores[-1][0]
            both = self._layers[layer] = (store[0], store[1])
        return both

    def keep(self, path_BA: Tensor, count_B: Tensor) -> None:
        """Commit the scratch positions named by `path_BA` (tree nodes, root first), `count_B` of each row; drop the rest."""
        for store in self._stores:
            kv_keep(store, self.table_BQ, self.length_B, path_BA, count_B)
        self._set(self.length_B + count_B)

    def cut(self, slot: int, length: int) -> None:
        """Forget what one slot has past this length: positions lie in the order of the text, so nothing of it is left."""
        self.length_S[slot] = length
        if self.bound is None:
            self._lengths[slot] = length
        self._refresh()

    def rollback(self, length_B: Tensor) -> None:
        """Forget everything past these lengths of the rows in use: a drafter's own guesses, once they are proposed."""
        self._set(length_B)


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)
