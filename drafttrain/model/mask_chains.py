"""Sequences followed by chains of mask slots, on which parallel drafters are trained in one pass, and attention over them
(arXiv 2504.18583, 2602.01469).

Shapes: B rows, T columns of text, A anchors of a row, S slots of a chain, X slots of all chains, N = T + X columns, M
predictions, H hidden, h heads, g KV heads, D head width.

Worked example: the text `a b c d e`, followed by two chains of one and of two slots. The first chain has source 0 and the
root b, the second has source 1 and the root c. For a drafter that reads tokens (root=True):

    column           0  1  2  3  4    5      6      7
    token            a  b  c  d  e    mask   mask   mask
    rotary position  0  1  2  3  4    2      3      4
    sees             all up to it     0 1 5  0-2 6  0-2 6 7
    predicts         -  c  d  e  -    d      e      -

With root=False column t holds the token t + 1 together with the target's state at t. Slots then see the columns up to the
source, and their positions are one lower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.model.batch import Anchors, Context, Pairs, TrainBatch
from drafttrain.model.blockwise_attention import Rule, blockwise_attention
from drafttrain.model.causal_attention import causal
from drafttrain.model.masks import Documents


@dataclass(frozen=True, slots=True)
class Retention:
    """The share of anchors that have a slot of depth d (from 1) in training: max(rate ** d, least).

    An anchor with a slot of one depth has slots of all depths before it.
    """

    rate: float
    least: float

    def shares(self, slots: int) -> list[float]:
        """The shares of depths 1 to `slots`."""
        return [max(self.rate**depth, self.least) for depth in range(1, slots + 1)]


@dataclass(frozen=True, slots=True)
class ChainGroup:
    """Chains of one length."""

    anchors: Anchors
    seen: Context  # the columns of text that each chain sees; of all processes' chains where they hold the rows together
    position_BAS: Tensor  # rotary positions

    @property
    def size(self) -> int:
        """Slots of one chain, S."""
        return self.position_BAS.shape[2]

    @property
    def slots(self) -> int:
        """Slots of all chains of a row."""
        return self.position_BAS[0].numel()


@dataclass(frozen=True, kw_only=True)
class Chains(Documents):
    """Documents with chains: a slot sees its anchor's part of the text and the slots of its chain up to itself."""

    text: Documents | None  # of the text alone, as `TrainBatch.sees`
    groups: tuple[ChainGroup, ...]
    position_BN: Tensor  # rotary positions of all columns

    @staticmethod
    def append_to(batch: TrainBatch, shares: Sequence[float] | None, slots: int, root: bool) -> Chains:
        """shares: of each sequence's anchors, those with a slot of depth 1, 2, ...; None: all anchors have `slots` slots."""
        anchor_groups = [(slots, batch.anchors())] if shares is None else batch.nested(shares)
        groups, slot_S = [], torch.arange(1, slots + 1, device=batch.token_BT.device)
        for size, anchors in anchor_groups if slots else []:
            first_BA = anchors.position_BA if root else batch.position_BT.gather(1, anchors.source_BA)
            groups.append(ChainGroup(anchors, batch.context(anchors, root), first_BA[..., None] + slot_S[:size]))
        position_BN = torch.cat([batch.position_BT, *(group.position_BAS.flatten(1) for group in groups)], 1)
        text = batch.sees()
        return Chains(batch.document_BT, batch.span, text=text, groups=tuple(groups), position_BN=position_BN)

    @property
    def columns(self) -> int:
        """Columns of text, T."""
        return self.number_BT.shape[1]

    def append_masks(self, token_BT: Tensor, mask_token: int) -> Tensor:
        """[B, N] the tokens, followed by a mask token for each slot."""
        return F.pad(token_BT, (0, self.position_BN.shape[1] - self.columns), value=mask_token)

    def steps(self, batch: TrainBatch, state_BNH: Tensor) -> Iterator[tuple[int, Pairs, Tensor]]:
        """(depth, pairs, states [M, H] of their slots) of depths 1, 2, ...; a label is depth + 1 positions after the root."""
        states = state_BNH[:, self.columns :].split([group.slots for group in self.groups], 1)
        for depth in range(1, max((group.size for group in self.groups), default=0) + 1):
            source, label, state = list[Tensor](), list[Tensor](), list[Tensor]()
            for group, state_BXH in zip(self.groups, states, strict=True):
                if group.size >= depth:
                    index_M, pairs = batch.future_of(group.anchors, 2 + depth)
                    source.append(pairs.source_M)
                    label.append(pairs.label_M)
                    state.append(state_BXH.unflatten(1, (-1, group.size))[:, :, depth - 1].flatten(0, 1)[index_M])
            yield depth, Pairs(batch.joined(source), batch.joined(label)), torch.cat(state)

    def dense(self) -> Tensor:
        """[B, N, N] bool: which columns each column sees; for models with their own attention."""
        assert self.span is None, "a dense mask needs all columns in one process; `attended` exchanges heads instead"
        B, T = self.number_BT.shape
        N = self.position_BN.shape[1]
        mask_BNN = torch.zeros(B, N, N, dtype=torch.bool, device=self.position_BN.device)
        column_T = torch.arange(T, device=mask_BNN.device)
        mask_BNN[:, :T, :T] = column_T <= column_T[:, None] if self.text is None else self.text.dense()
        start = T
        for group in self.groups:
            group_columns, slot_X = slice(start, start + group.slots), torch.arange(group.slots, device=mask_BNN.device)
            mask_BNN[:, group_columns, :T] = group.seen.seen(T).repeat_interleave(group.size, 1)
            chain_X = slot_X // group.size
            mask_BNN[:, group_columns, group_columns] = (chain_X[:, None] == chain_X) & (slot_X <= slot_X[:, None])
            start += group.slots
        return mask_BNN


def attended(
    q_BhND: Tensor,
    k_BgND: Tensor,
    v_BgND: Tensor,
    documents: Documents | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """[B, h, N, D]: `causal`, or for `Chains` attention of every slot to its anchor's part of the text and the slots before it.

    No score or mask of all columns is in memory at once.
    """
    if not isinstance(documents, Chains):
        return causal(q_BhND, k_BgND, v_BgND, documents, window, scale)
    sizes, span = [documents.columns, *(group.slots for group in documents.groups)], documents.span
    text, *chains = zip(*(torch.split(x, sizes, 2) for x in (q_BhND, k_BgND, v_BgND)), strict=True)
    q_BhTD, k_BgTD, v_BgTD = text
    outputs = [causal(q_BhTD, k_BgTD, v_BgTD, documents.text, window, scale)]
    if span is not None:
        k_BgTD, v_BgTD = span.gather(k_BgTD), span.gather(v_BgTD)
    for group, chain_qkv in zip(documents.groups, chains, strict=True):
        slots = chain_qkv if span is None else [span.heads(x) for x in chain_qkv]
        q_BhASD, k_BgASD, v_BgASD = (x.reshape(*x.shape[:2], -1, group.size, x.shape[-1]) for x in slots)
        rule = Rule(chained=True, window=window, scale=scale)
        out_BhXD = blockwise_attention(q_BhASD, k_BgASD, v_BgASD, k_BgTD, v_BgTD, group.seen, rule).flatten(2, 3)
        outputs.append(out_BhXD if span is None else span.positions(out_BhXD))
    return torch.cat(outputs, 2)


def reference(
    q_BhND: Tensor, k_BgND: Tensor, v_BgND: Tensor, chains: Chains, window: int | None = None, scale: float | None = None
) -> Tensor:
    """The twin of `attended`: all scores at once; a window counts rotary positions."""
    mask_BNN, groups = chains.dense(), q_BhND.shape[1] // k_BgND.shape[1]
    if window is not None:
        mask_BNN = mask_BNN & (chains.position_BN[..., None] - chains.position_BN[:, None] < window)
    score_BhNN = q_BhND @ k_BgND.repeat_interleave(groups, 1).transpose(-1, -2) * (scale or q_BhND.shape[-1] ** -0.5)
    share_BhNN = score_BhNN.masked_fill(~mask_BNN[:, None], -torch.inf).softmax(-1)
    return share_BhNN @ v_BgND.repeat_interleave(groups, 1)
