"""Move an accepted path to the end of the committed prefix, in all layers of a paged KV store at once.

Shapes: L layers, Q pages, P positions of a page, h KV heads, D head width, B rows, A accepted nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import library


def kv_keep(store: Tensor, table_BQ: Tensor, length_B: Tensor, path_BA: Tensor, count_B: Tensor) -> None:
    """Move position length + path[a] to length + a, for the first `count` entries of each path. store: [L, 2, Q, P, h, D].

    Every path ascends from node 0. Paths overlap their destinations, so every row is read before it is overwritten.
    """
    if library.serves(store):
        page = store.shape[3]
        torch.ops.drafttrain.kv_keep(store, table_BQ, length_B, path_BA.contiguous(), count_B, page)
    else:
        reference(store, table_BQ, length_B, path_BA, count_B)


def reference(store: Tensor, table_BQ: Tensor, length_B: Tensor, path_BA: Tensor, count_B: Tensor) -> None:
    """The plain-torch twin of `kv_keep`."""
    column_A = torch.arange(path_BA.shape[1], device=path_BA.device)
    counts_BA = column_A < count_B[:, None]
    # on other devices this check would sync with the host, which costs more than the copy
    if path_BA.device.type == "cpu" and not bool(((path_BA != column_A) & counts_BA).any()):
        return
    target_BA = flat(table_BQ, length_B[:, None] + torch.where(counts_BA, column_A, 0), store.shape[3])
    source_BA = flat(table_BQ, length_B[:, None] + torch.where(counts_BA, path_BA, 0), store.shape[3])
    positions = store.flatten(2, 3)
    positions[:, :, target_BA] = positions[:, :, source_BA]


def flat(table_BQ: Tensor, position_BN: Tensor, page: int) -> Tensor:
    """[B, N]: indices of these positions of each row in the pages of the store, concatenated."""
    position_BN = position_BN.clamp_max(table_BQ.shape[1] * page - 1)
    return table_BQ.gather(1, position_BN // page) * page + position_BN % page
