"""A second storage of the KV cache: every slot's positions in one run of memory, without pages.

Shapes: L layers, S slots, B rows, P positions, h KV heads, D head width, N new positions, A accepted nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.model.kv_storage import CacheRows, PageView


class ContiguousStorage:
    """[L, 2, S, P, h, D]. Operators that address pages are offered none."""

    paged = False

    def __init__(
        self, layers: int, slots: int, max_len: int, device: torch.device, pages: int | None, kept: int | None = None
    ) -> None:
        self.page = self.capacity = max_len
        self.pages, self.layers = slots, layers
        self._empty, self._device = set(range(slots)), device
        self._shapes: dict[tuple[int, int], Tensor] = {}  # one tensor for each shape of layers
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    @property
    def free_pages(self) -> int:
        return len(self._empty)

    @property
    def bytes_per_position(self) -> int:
        return sum(store.nbytes for store in self._shapes.values()) // ((self.pages + 1) * self.capacity)

    def select(self, rows: CacheRows, in_order: bool) -> None:
        self._slot_B = rows.slot_B

    def allocate(self, layers: Sequence[int], heads: int, width: int, value_width: int, dtype: torch.dtype) -> None:
        assert width == value_width, "this storage is for tests of one width"
        for layer in layers:
            if self._layers[layer] is None:
                if (heads, width) not in self._shapes:
                    shape = (self.layers, 2, self.pages + 1, self.capacity, heads, width)
                    self._shapes[heads, width] = torch.zeros(shape, dtype=dtype, device=self._device)
                keys, values = self._shapes[heads, width][layer]
                self._layers[layer] = (keys, values)

    def write(self, layer: int, rows: CacheRows, k_BhND: Tensor, v_BhND: Tensor, earlier: int) -> None:
        self.allocate([layer], k_BhND.shape[1], k_BhND.shape[3], v_BhND.shape[3], k_BhND.dtype)
        node_N = torch.arange(earlier, earlier + k_BhND.shape[2], device=self._device)
        at_BN = self._places(rows, node_N.expand(len(rows.slot_B), -1))
        for store_SPhD, new_BhND in zip(self._layer(layer), (k_BhND, v_BhND), strict=True):
            store_SPhD[self._slot_B[:, None], at_BN] = new_BhND.transpose(1, 2)

    def read(self, layer: int, positions: int) -> tuple[Tensor, Tensor]:
        keys, values = (store_SPhD[self._slot_B, :positions].transpose(1, 2) for store_SPhD in self._layer(layer))
        return keys, values

    def read_row(self, layer: int, slot: int, positions: int) -> tuple[Tensor, Tensor]:
        keys, values = (store_SPhD[slot, :positions].transpose(0, 1) for store_SPhD in self._layer(layer))
        return keys, values

    def view(self, rows: CacheRows) -> PageView | None:
        if not self.paged:
            return None
        return PageView(self._layers, [*self._shapes.values()], self._slot_B[:, None], rows)

    def move(self, rows: CacheRows, path_BA: Tensor, count_B: Tensor) -> None:
        column_A, slot_B1 = torch.arange(path_BA.shape[1], device=self._device), self._slot_B[:, None]
        kept_BA = column_A < count_B[:, None]
        to_BA, from_BA = (self._places(rows, torch.where(kept_BA, node_BA, 0)) for node_BA in (column_A, path_BA))
        for store_L2SPhD in self._shapes.values():
            store_L2SPhD[:, :, slot_B1, to_BA] = store_L2SPhD[:, :, slot_B1, from_BA]

    def reserve(self, slot: int, positions: int) -> None:
        if positions > self.capacity:
            raise ValueError(f"{positions} positions exceed a slot's {self.capacity}")
        self._empty.remove(slot)

    def fork(self, source: int, slot: int, prefix: int, positions: int) -> None:
        self._empty.discard(slot)
        for store_L2SPhD in self._shapes.values():
            store_L2SPhD[:, :, slot, :prefix] = store_L2SPhD[:, :, source, :prefix]

    def release(self, slot: int) -> None:
        self._empty.add(slot)

    def _layer(self, number: int) -> tuple[Tensor, Tensor]:
        both = self._layers[number]
        assert both is not None
        return both

    def _places(self, rows: CacheRows, node_BN: Tensor) -> Tensor:
        """Positions of these nodes; a row whose sequence has ended may go past the last one."""
        return (rows.length_B[:, None] + node_BN).clamp_max(self.capacity - 1)


class OnePageStorage(ContiguousStorage):
    """The same memory, offered to operators as one page per slot."""

    paged = True
