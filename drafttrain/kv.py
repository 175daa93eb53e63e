"""Floor 0: the KV cache of one model: a committed prefix per slot, then scratch positions of the open tree.

Shapes: L layers, S slots, B rows in use, h KV heads, P positions, D head width, N tree nodes, A accepted nodes.

Worked example: a slot with length 5 verifies a tree of 4 nodes. Node i is written at position 5 + i, whatever its
depth. If nodes 0, 1, 3 are accepted, `keep` moves positions 5, 6, 8 to 5, 6, 7 and the length becomes 8.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of `layers` layers for `slots` requests of at most `max_len` positions.

    Storage is allocated at the first write, in the dtype and on the device of what is written. `rows(slot_B)`
    chooses the slots that the following writes and keeps concern.
    """

    def __init__(self, layers: int, slots: int, max_len: int, device: torch.device | str = "cpu") -> None:
        self.layers, self.slots, self.max_len = layers, slots, max_len
        self.length_S = torch.zeros(slots, dtype=torch.long, device=device)
        self._stores: list[Tensor] = []  # each [layers or 1, 2, S, h, P, D]; one, unless layers differ in shape
        self._layers: list[Tensor | None] = [None] * layers  # [2, S, h, P, D] of each, in one of the stores
        self.rows(torch.arange(slots, device=device))

    def rows(self, slot_B: Tensor) -> None:
        """Name the slots in use; row b of every later call belongs to slot `slot_B[b]`."""
        self.slot_B = slot_B
        self._all = len(slot_B) == self.slots and bool((slot_B == torch.arange(self.slots, device=slot_B.device)).all())
        self._refresh()

    def _refresh(self) -> None:
        self.length_B = self.length_S[self.slot_B]
        self.longest = int(self.length_B.max()) if len(self.slot_B) else 0
        self.even = bool((self.length_B == self.longest).all())

    def reset(self, slot_R: Tensor) -> None:
        """Empty these slots for new requests."""
        self.length_S[slot_R] = 0
        self._refresh()

    def room(self, nodes: int) -> None:
        """Raise ValueError when `nodes` more positions do not fit every row in use."""
        if self.longest + nodes > self.max_len:
            raise ValueError(
                f"{self.longest} committed + {nodes} new positions exceed the cache's {self.max_len}; raise max_len"
            )

    def write(self, layer: int, k_BhND: Tensor, v_BhND: Tensor) -> tuple[Tensor, Tensor]:
        """Put N scratch positions after each row's prefix; return all keys and values [B, h, longest + N, D].

        Columns past a row's own length + N hold old data: the caller's mask must hide them.
        """
        N, P = k_BhND.shape[2], self.longest + k_BhND.shape[2]
        keys, values = self._storage(layer, k_BhND)
        if self.even:
            at: slice | Tensor = slice(self.longest, P)
            if self._all:
                keys[:, :, at], values[:, :, at] = k_BhND, v_BhND
                return keys[:, :, :P], values[:, :, :P]
            keys[self.slot_B, :, at], values[self.slot_B, :, at] = k_BhND, v_BhND
        else:
            at = self.length_B[:, None] + torch.arange(N, device=k_BhND.device)
            keys[self.slot_B[:, None], :, at] = k_BhND.transpose(1, 2)
            values[self.slot_B[:, None], :, at] = v_BhND.transpose(1, 2)
        if self._all:
            return keys[:, :, :P], values[:, :, :P]
        return keys[self.slot_B, :, :P], values[self.slot_B, :, :P]

    def _storage(self, layer: int, like_BhND: Tensor) -> tuple[Tensor, Tensor]:
        both = self._layers[layer]
        if both is None:
            _, heads, _, width = like_BhND.shape
            shape = (2, self.slots, heads, self.max_len, width)
            if not self._stores:
                self._stores.append(like_BhND.new_zeros(self.layers, *shape))
            elif self._stores[0].shape[1:] != shape:
                self._stores.append(like_BhND.new_zeros(1, *shape))
            both = self._stores[0][layer] if self._stores[0].shape[1:] == shape else self._stores[-1][0]
            self._layers[layer] = both
        return both[0], both[1]

    def keep(self, path_BA: Tensor, count_B: Tensor) -> None:
        """Commit the scratch positions named by `path_BA` (tree nodes, root first), `count_B` of each row; drop the rest.

        Reads all source rows before it writes: paths overlap their destinations.
        """
        A = path_BA.shape[1]
        column_A = torch.arange(A, device=path_BA.device)
        moved = (path_BA != column_A) & (column_A < count_B[:, None])
        if bool(moved.any()):
            target_BA = (self.length_B[:, None] + column_A).clamp_max(self.max_len - 1)
            source_BA = self.length_B[:, None] + torch.where(column_A < count_B[:, None], path_BA, column_A)
            source_BA = source_BA.clamp_max(self.max_len - 1)
            row_B1 = self.slot_B[:, None]
            for store in self._stores:
                store[:, :, row_B1, :, target_BA] = store[:, :, row_B1, :, source_BA]
        self.length_S[self.slot_B] = self.length_B + count_B
        self._refresh()

    def rollback(self, length_B: Tensor) -> None:
        """Forget everything past these lengths of the rows in use: a drafter's own guesses, once they are proposed."""
        self.length_S[self.slot_B] = length_B
        self._refresh()


def visible(length_B: Tensor, longest: int, ancestor_BNN: Tensor) -> Tensor:
    """[B, N, longest + N] bool: what tree node i may attend to: its row's prefix, and its ancestors' scratch positions.

    With the class's example (length 5, longest 5): node 3 sees positions 0-4, then 5 (node 0), 6 (node 1), 8 (itself).
    """
    B, N, _ = ancestor_BNN.shape
    position_P = torch.arange(longest + N, device=length_B.device)
    node_BP = position_P - length_B[:, None]
    scratch_BNP = ancestor_BNN.gather(2, node_BP.clamp(0, N - 1)[:, None].expand(B, N, -1))
    inside_BP = (node_BP >= 0) & (node_BP < N)
    return (node_BP < 0)[:, None] | (scratch_BNP & inside_BP[:, None])
