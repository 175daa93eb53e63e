"""Writing a paged KV cache: new positions before a layer's attention, and the accepted path after verification.

`append` is the part of a layer between its projection and its attention: q/k norm, rotary embedding, writing the cache. On a
CPU the `attend` operator does it itself, together with the attention. `kv_keep` moves an accepted path to the end of the
committed prefix, in all layers at once. `commit` makes of the accepted paths all else that a decode step gives.

Shapes: S slots, B rows, N new positions or tree nodes, A accepted nodes, M rotary positions, L layers, Q pages (of a row, or
of the store), P positions of a page, h query heads, k KV heads (h in a store), D head width, X = (h + 2 k) D, K stop tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.core.tree import DraftTree
from drafttrain.ops import library
from drafttrain.ops.accept import nodes

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
        torch.ops.drafttrain.kv_keep(store, table_BQ, length_B, path_BA.contiguous(), count_B, page)
    else:
        keep_reference(store, table_BQ, length_B, path_BA, count_B)


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


@dataclass(frozen=True, slots=True)
class Sequences:
    """The state of each slot's text, which `commit` writes in place, but for the last two."""

    root_S: Tensor  # last accepted token
    made_S: Tensor  # new tokens so far
    done_S: Tensor  # bool: the text has ended
    limit_S: Tensor  # new tokens at most
    stop_SK: Tensor  # stop tokens; -1: none


@dataclass(frozen=True, slots=True)
class Committed:
    """token_BA: the accepted tokens. next_BA: the token after each, the bonus token after the last. Past count_B, and for rows
    that have ended, the entries mean nothing. record_BX, X = A + 3: next_BA, then count, verified nodes, and whether the last
    accepted node had children.
    """

    token_BA: Tensor
    next_BA: Tensor
    count_B: Tensor
    record_BX: Tensor


def commit(
    tree: DraftTree,
    path_BA: Tensor,
    count_B: Tensor,
    bonus_B: Tensor,
    slot_B: Tensor,
    sequences: Sequences,
    skips: bool,
    counts: bool,
) -> Committed:
    """What a decode step makes of its accepted paths, in one operator: tokens, the state of each text, the host's record.

    skips: rows whose text has ended commit nothing (count 0). counts: keep the text's length, and whether it has ended.
    """
    if not library.serves(tree.token_BN.new_empty(0, dtype=torch.float32)):
        return reference(tree, path_BA, count_B, bonus_B, slot_B, sequences, skips, counts)
    B, A = path_BA.shape
    assert A == 1 or path_BA.stride(1) == 1, "a path's entries lie side by side; rows may lie apart"
    empty = tree.token_BN.new_empty
    committed = Committed(empty(B, A), empty(B, A), empty(B), empty(B, A + 3))
    state = (sequences.root_S, sequences.made_S, sequences.done_S)
    inputs = (path_BA, count_B.contiguous(), bonus_B, slot_B, sequences.stop_SK, sequences.limit_S, skips, counts)
    out = (committed.token_BA, committed.next_BA, committed.count_B, committed.record_BX)
    torch.ops.drafttrain.commit(*nodes(tree), *inputs, *state, *out)
    return committed


def reference(
    tree: DraftTree,
    path_BA: Tensor,
    count_B: Tensor,
    bonus_B: Tensor,
    slot_B: Tensor,
    sequences: Sequences,
    skips: bool,
    counts: bool,
) -> Committed:
    """The plain-torch twin of `commit`."""
    last_B1 = path_BA.gather(1, count_B[:, None] - 1)
    real_BN = torch.arange(tree.token_BN.shape[1], device=slot_B.device) < tree.count_B[:, None]
    has_children_B = ((tree.parent_BN == last_B1) & real_BN).any(-1)
    count_B = count_B.masked_fill(sequences.done_S[slot_B], 0) if skips else count_B
    token_BA, next_BA = shifted(tree, path_BA, count_B, bonus_B)
    sequences.root_S[slot_B] = bonus_B
    if counts:
        made_B = sequences.made_S[slot_B] + count_B
        valid_BA = torch.arange(path_BA.shape[1], device=slot_B.device) < count_B[:, None]
        stops_BA = (next_BA[..., None] == sequences.stop_SK[slot_B][:, None]).any(-1) & valid_BA
        sequences.made_S[slot_B] = made_B
        sequences.done_S[slot_B] = sequences.done_S[slot_B] | stops_BA.any(-1) | (made_B >= sequences.limit_S[slot_B])
    record_BX = torch.cat([next_BA, torch.stack([count_B, tree.count_B, has_children_B.long()], 1)], 1)
    return Committed(token_BA, next_BA, count_B, record_BX)


def shifted(tree: DraftTree, path_BA: Tensor, count_B: Tensor, bonus_B: Tensor) -> tuple[Tensor, Tensor]:
    """(token_BA, next_BA): the accepted tokens, and the token after each."""
    token_BA = tree.token_BN.gather(1, path_BA)
    next_BA = torch.cat([token_BA[:, 1:], token_BA[:, :1]], 1)
    return token_BA, next_BA.scatter(1, (count_B - 1).clamp_min(0)[:, None], bonus_B[:, None])
