"""Attention masks: which positions see which, for prefixes, draft trees and packed documents.

Shapes: B rows, N new positions, P cached + new positions, T positions of whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from drafttrain.core.sequence_shard import Span
from drafttrain.model.kv_cache import KVCache
from drafttrain.ops.tree_attention import visible


@dataclass(frozen=True)
class Documents:
    """Whole sequences of several documents each: attention is causal within a document, and there is none between two."""

    number_BT: Tensor  # document of every position, also of other processes; -1 on padding; a document's positions are adjacent
    span: Span | None = None  # the columns that this process holds
    host_BT: Tensor | None = None  # number_BT on the host, where it is there too

    def dense(self) -> Tensor:
        """[B, T, T] bool: which positions each position sees."""
        assert self.span is None, "a dense mask needs all columns in one process; `causal` exchanges heads instead"
        column_T = torch.arange(self.number_BT.shape[1], device=self.number_BT.device)
        return (self.number_BT[:, None] == self.number_BT[..., None]) & (column_T <= column_T[:, None])

    @cached_property
    def lengths(self) -> list[list[int]]:
        """Lengths of each row's documents and of its padding, in order."""
        number_BT = self.number_BT.cpu() if self.host_BT is None else self.host_BT
        return [row_T.unique_consecutive(return_counts=True)[1].tolist() for row_T in number_BT]

    @property
    def several(self) -> bool:
        """Whether a row has more than one."""
        return any(len(lengths) > 1 for lengths in self.lengths)

    @cached_property
    def ends(self) -> tuple[Tensor, int]:
        """(0, then where each document of all rows in a line ends, int32 on the device; the length of the longest)."""
        lengths = torch.tensor([0, *chain.from_iterable(self.lengths)], dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.number_BT.device), int(lengths.max())


def attention_mask(
    kv: KVCache | None,
    ancestor_BNN: Tensor | Documents | None,
    position_BN: Tensor,
    window: int | None,
    chunk: int | None = None,
) -> Tensor:
    """[B, N, P] bool: the keys that each new position attends to: the prefix and its ancestors.

    kv None: there is no prefix. ancestor_BNN: [B, N, M] where the N new positions are the last of a tree of M. window:
    positions that a query sees at most, its own included; None: all. Earlier nodes of the tree, whose rotary positions are not
    given, are within it. chunk: a query sees its own chunk of so many positions alone: with 8, position 9 sees positions 8 and
    9; M is N then.
    """
    B, N = position_BN.shape
    if isinstance(ancestor_BNN, Documents):
        ancestor_BNN = ancestor_BNN.dense()
    if ancestor_BNN is None:
        ancestor_BNN = torch.ones(N, N, dtype=torch.bool, device=position_BN.device).tril().expand(B, N, N)
    mask_BNP = ancestor_BNN if kv is None else visible(kv.length_B, kv.longest, ancestor_BNN)
    if window is None and chunk is None:
        return mask_BNP
    key_BP = position_BN
    if kv is not None:
        key_BP = torch.arange(mask_BNP.shape[-1], device=position_BN.device).repeat(B, 1)
        column_N = torch.arange(ancestor_BNN.shape[2] - N, ancestor_BNN.shape[2], device=position_BN.device)
        key_BP = key_BP.scatter(1, kv.length_B[:, None] + column_N, position_BN)
    if window is not None:
        mask_BNP = mask_BNP & (position_BN[..., None] - key_BP[:, None] < window)
    if chunk is not None:
        mask_BNP = mask_BNP & (position_BN[..., None] // chunk == key_BP[:, None] // chunk)
    return mask_BNP


def additive(mask_BNP: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, N, P]: 0 where the mask is true, the dtype's lowest number elsewhere."""
    zero = torch.zeros((), dtype=dtype, device=mask_BNP.device)
    return torch.where(mask_BNP, zero, torch.finfo(dtype).min)[:, None]
