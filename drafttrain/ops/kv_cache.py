"""Writing a paged KV cache: new positions before a layer's attention, and the accepted path after verification.

`append` is the part of a layer between its projection and its attention: q/k norm, rotary embedding, writing the cache. On a
CPU the `attend` operator does it itself, together with the attention. `kv_keep` moves an accepted path to the end of the
committed prefix, in all layers at once. `advance` counts the new positions.

Shapes: B rows, N new positions, A accepted nodes, M rotary positions, L layers, Q pages (of a row, or of the store), P
positions of a page, h query heads, k KV heads (h in a store), D head width, X = (h + 2 k) D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import library

WIDEST = 256


def append(
    qkv_BNX: Tensor, cos_MD: Tensor, sin_MD: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    position_BN: Tensor, table_BQ: Tensor, length_B: Tensor, keys: Tensor, values: Tensor, heads: int, earlier: int = 0,
) -> Tensor:  # fmt: skip
    """Norm and rotate the queries, write keys and values to positions length + earlier + i of the cache, return query_BNhD.

    qkv_BNX: query heads, then key heads, then value heads, as projected. q_weight, k_weight: weights of the heads' RMS norm,
    None for no norm. The sines carry a sign: -sin for the first half of a vector. position_BN: the nodes' rotary positions.
    keys, values: [pages, page, k, D], written in place. heads may be 0: only keys and values. earlier: nodes of the tree that
    are in the cache already. The caller ensures that length + earlier + N fits in the table's pages.
    """
    if not _serves(qkv_BNX, keys, values):
        return append_reference(
            qkv_BNX, cos_MD, sin_MD, q_weight, k_weight, eps, position_BN, table_BQ, length_B, keys, values, heads,
            earlier,
        )  # fmt: skip
    query_BNhD = qkv_BNX.new_empty(*position_BN.shape, heads, keys.shape[-1])
    torch.ops.drafttrain.append(
        qkv_BNX, cos_MD, sin_MD, q_weight, k_weight, eps, position_BN.contiguous(), table_BQ.contiguous(),
        length_B.contiguous(), earlier, keys, values, query_BNhD,
    )  # fmt: skip
    return query_BNhD


def _serves(qkv_BNX: Tensor, keys: Tensor, values: Tensor) -> bool:
    contiguous = qkv_BNX.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    supported = keys.shape[-1] in range(2, WIDEST + 1, 2) and keys.dtype == qkv_BNX.dtype
    return contiguous and supported and library.serves(qkv_BNX)


def append_reference(
    qkv_BNX: Tensor, cos_MD: Tensor, sin_MD: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    position_BN: Tensor, table_BQ: Tensor, length_B: Tensor, keys: Tensor, values: Tensor, heads: int, earlier: int = 0,
) -> Tensor:  # fmt: skip
    """The plain-torch twin of `append`."""
    _, page, kv_heads, D = keys.shape
    qkv_BNhD = qkv_BNX.view(*qkv_BNX.shape[:2], -1, D)
    q_BNhD, k_BNhD, v_BNhD = torch.split(qkv_BNhD, [heads, kv_heads, kv_heads], 2)
    cos_BN1D, sin_BN1D = cos_MD[position_BN][:, :, None].float(), sin_MD[position_BN][:, :, None].float()

    def rotated(x_BNhD: Tensor, weight_D: Tensor | None) -> Tensor:
        wide_BNhD = x_BNhD.float()
        if weight_D is not None:
            scale_BNh1 = torch.rsqrt(wide_BNhD.square().mean(-1, keepdim=True) + eps)
            wide_BNhD = ((wide_BNhD * scale_BNh1).to(x_BNhD.dtype) * weight_D).float()
        return (wide_BNhD * cos_BN1D + wide_BNhD.roll(D // 2, -1) * sin_BN1D).to(x_BNhD.dtype)

    node_N = torch.arange(position_BN.shape[1], device=keys.device)
    index_BN = flat(table_BQ, length_B[:, None] + earlier + node_N, page)
    keys.view(-1, kv_heads, D)[index_BN] = rotated(k_BNhD, k_weight)
    values.view(-1, kv_heads, D)[index_BN] = v_BNhD
    return rotated(q_BNhD, q_weight)


def kv_keep(store: Tensor, table_BQ: Tensor, length_B: Tensor, path_BA: Tensor, count_B: Tensor) -> None:
    """Move position length + path[a] to length + a, for the first `count` entries of each path. store: [L, 2, Q, P, h, D].

    Every path ascends from node 0. Paths overlap their destinations, so every row is read before it is overwritten.
    """
    if library.serves(store):
        page = store.shape[3]
        torch.ops.drafttrain.kv_keep(store, table_BQ, length_B, path_BA.contiguous(), count_B.contiguous(), page)
    else:
        keep_reference(store, table_BQ, length_B, path_BA, count_B)


def advance(length_B: Tensor, count_B: Tensor, slot_B: Tensor, length_S: Tensor) -> Tensor:
    """length_B + count_B, which is also written to the slots' entries of length_S."""
    if library.serves_on(slot_B.device):
        longer_B = length_B.new_empty(length_B.shape)
        torch.ops.drafttrain.advance(length_B, count_B.contiguous(), slot_B, length_S, longer_B)
        return longer_B
    return advance_reference(length_B, count_B, slot_B, length_S)


def advance_reference(length_B: Tensor, count_B: Tensor, slot_B: Tensor, length_S: Tensor) -> Tensor:
    """The plain-torch twin of `advance`."""
    longer_B = length_B + count_B
    length_S[slot_B] = longer_B
    return longer_B


def keep_reference(store: Tensor, table_BQ: Tensor, length_B: Tensor, path_BA: Tensor, count_B: Tensor) -> None:
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
