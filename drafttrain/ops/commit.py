"""What a decode step makes of its accepted paths, in one operator: tokens, the state of each text, the host's record. And what
drafters get and store of them.

Shapes: S slots, B rows, N tree nodes, A accepted nodes, K stop tokens, X = A + 3, P places of a text, H numbers of a state,
W columns of a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.core.tree import DraftTree
from drafttrain.ops import library
from drafttrain.ops.accept import nodes


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
    that have ended, the entries mean nothing. record_BX: next_BA, then count, verified nodes, and whether the last accepted
    node had children.
    """

    token_BA: Tensor
    next_BA: Tensor
    count_B: Tensor
    record_BX: Tensor


def commit(
    tree: DraftTree,
    path_BN: Tensor,
    columns: int,
    count_B: Tensor,
    bonus_B: Tensor,
    slot_B: Tensor,
    sequences: Sequences,
    skips: bool,
    counts: bool,
) -> Committed:
    """columns: A; no path is longer. skips: rows whose text has ended commit nothing (count 0). counts: keep the text's length,
    and whether it has ended.
    """
    if not library.serves_on(slot_B.device):
        return reference(tree, path_BN[:, :columns], count_B, bonus_B, slot_B, sequences, skips, counts)
    B, A = len(path_BN), columns
    assert A == 1 or path_BN.stride(1) == 1, "a path's entries lie side by side; rows may lie apart"
    empty = tree.token_BN.new_empty
    committed = Committed(empty(B, A), empty(B, A), empty(B), empty(B, A + 3))
    state = (sequences.root_S, sequences.made_S, sequences.done_S)
    inputs = (path_BN, count_B.contiguous(), bonus_B, slot_B, sequences.stop_SK, sequences.limit_S, skips, counts)
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


def along(values: Sequence[Tensor], path_BN: Tensor, columns: int) -> list[Tensor]:
    """[B, A, H] each: of values [B, N, H] those at the first `columns` nodes of each path."""
    if not library.serves_on(path_BN.device):
        return [along_reference(values_BNH, path_BN[:, :columns]) for values_BNH in values]
    out = [values_BNH.new_empty(len(path_BN), columns, values_BNH.shape[-1]) for values_BNH in values]
    torch.ops.drafttrain.along([values_BNH.contiguous() for values_BNH in values], path_BN, out)
    return out


def along_reference(values_BNH: Tensor, path_BA: Tensor) -> Tensor:
    """The plain-torch twin of `along`."""
    return values_BNH.gather(1, path_BA[..., None].expand(-1, -1, values_BNH.shape[-1]))


def keep_last(hidden_SH: Tensor, root_S: Tensor, hidden_BAH: Tensor, next_BA: Tensor, count_B: Tensor, slot_B: Tensor) -> None:
    """Store each row's last state and the token after it. Rows with count 0 change nothing."""
    if not library.serves_on(slot_B.device) or hidden_BAH.dtype != hidden_SH.dtype:
        keep_last_reference(hidden_SH, root_S, hidden_BAH, next_BA, count_B, slot_B)
        return
    rows = (hidden_BAH.contiguous(), next_BA.contiguous(), count_B.contiguous(), slot_B)
    torch.ops.drafttrain.keep_last(*rows, hidden_SH, root_S)


def keep_last_reference(
    hidden_SH: Tensor, root_S: Tensor, hidden_BAH: Tensor, next_BA: Tensor, count_B: Tensor, slot_B: Tensor
) -> None:
    """The plain-torch twin of `keep_last`."""
    updated_B, last_B1 = count_B > 0, (count_B - 1).clamp_min(0)[:, None]
    last_BH = along_reference(hidden_BAH, last_B1)[:, 0].to(hidden_SH.dtype)
    hidden_SH[slot_B] = torch.where(updated_B[:, None], last_BH, hidden_SH[slot_B])
    root_S[slot_B] = torch.where(updated_B, next_BA.gather(1, last_B1)[:, 0], root_S[slot_B])


def append_pending(
    values: Sequence[Tensor], count_B: Tensor, slot_B: Tensor, stores: Sequence[Tensor], pending_S: Tensor
) -> None:
    """Append the first `count` columns of each row's values [B, A, ...] to its slot's in the stores [S, W, ...], which hold
    `pending` columns of it. The last column of a store takes padding.
    """
    if not library.serves_on(slot_B.device):
        append_pending_reference(values, count_B, slot_B, stores, pending_S)
        return
    torch.ops.drafttrain.append_pending(
        [value_BA.contiguous() for value_BA in values], count_B.contiguous(), slot_B, list(stores), pending_S
    )


def append_pending_reference(
    values: Sequence[Tensor], count_B: Tensor, slot_B: Tensor, stores: Sequence[Tensor], pending_S: Tensor
) -> None:
    """The plain-torch twin of `append_pending`."""
    column_A, pending_B = torch.arange(values[0].shape[1], device=slot_B.device), pending_S[slot_B]
    index_BA = torch.where(column_A < count_B[:, None], pending_B[:, None] + column_A, stores[0].shape[1] - 1)
    for store_SW, value_BA in zip(stores, values, strict=True):
        store_SW[slot_B[:, None], index_BA] = value_BA
    pending_S[slot_B] = pending_B + count_B


def take_pending(stores: Sequence[Tensor], slot_B: Tensor, pending_S: Tensor, columns: int) -> tuple[list[Tensor], Tensor]:
    """([B, columns, ...] of each store [S, W, ...], count_B): the first columns of these slots, and how many of them count.
    After it none do.
    """
    if not library.serves_on(slot_B.device):
        return take_pending_reference(stores, slot_B, pending_S, columns)
    out = [store_SW.new_empty(len(slot_B), columns, *store_SW.shape[2:]) for store_SW in stores]
    count_B = torch.empty_like(slot_B)
    torch.ops.drafttrain.take_pending(list(stores), slot_B, pending_S, out, count_B)
    return out, count_B


def take_pending_reference(
    stores: Sequence[Tensor], slot_B: Tensor, pending_S: Tensor, columns: int
) -> tuple[list[Tensor], Tensor]:
    """The plain-torch twin of `take_pending`."""
    count_B = pending_S[slot_B]
    pending_S.index_fill_(0, slot_B, 0)
    return [store_SW[slot_B, :columns] for store_SW in stores], count_B


def append_text(text_SP: Tensor, length_S: Tensor, token_BA: Tensor, next_BA: Tensor, count_B: Tensor, slot_B: Tensor) -> None:
    """Write the first token of each row at its text's `length`, then the `count` tokens after; the length grows by `count`.

    Rows with count 0 change nothing. The last place of a text takes padding.
    """
    if not library.serves_on(slot_B.device):
        append_text_reference(text_SP, length_S, token_BA, next_BA, count_B, slot_B)
        return
    rows = (token_BA.contiguous(), next_BA.contiguous(), count_B.contiguous(), slot_B)
    torch.ops.drafttrain.append_text(*rows, text_SP, length_S)


def append_text_reference(
    text_SP: Tensor, length_S: Tensor, token_BA: Tensor, next_BA: Tensor, count_B: Tensor, slot_B: Tensor
) -> None:
    """The plain-torch twin of `append_text`."""
    added_BA = torch.cat([token_BA[:, :1], next_BA], 1)
    column_A, length_B = torch.arange(added_BA.shape[1], device=slot_B.device), length_S[slot_B]
    valid_BA = (column_A <= count_B[:, None]) & (count_B > 0)[:, None]
    index_BA = torch.where(valid_BA, length_B[:, None] + column_A, text_SP.shape[1] - 1)
    text_SP[slot_B[:, None], index_BA] = added_BA
    length_S[slot_B] = length_B + count_B
