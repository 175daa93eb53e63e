"""Training batches, and the only code that shifts tokens against positions.

Shapes: B sequences, T positions, A anchors of a sequence, H hidden, M (source, label) pairs, V vocabulary, k likeliest tokens.

Worked example: one sequence of tokens `a b c d e`, all supervised.

    position          0   1   2   3   4
    future(2).source  0   1   2              a drafter standing at 0 holds h[0] and knows b (the root)
    future(2).label   2   3   4              and drafts c: the token at label 2, whose law is the target's output at 1
    after(1)          b   c   d   e   -
    anchors().source  0   1   2              a block that stands at 0 begins with the root b, its anchor, at position 1;
    ahead(.., 3)      3   4                  it sees the target's states at 0 alone, and its second draft is the token at 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.sequence_shard import Group, Span
from drafttrain.model.masks import Documents
from drafttrain.ops.remap import remap_logits

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # spreads a batch's digest over all bits


@dataclass(frozen=True, slots=True)
class Pairs:
    """Flat indices into [B * T]: where a prediction is made, and the token it predicts."""

    source_M: Tensor
    label_M: Tensor


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where block drafters stand: some sources of each sequence, in order, whose roots begin a block each.

    source_BA: columns; 0 where real_BA is False. token_BA, position_BA: the roots'. share: of all such sources that these are.
    parts: where several processes hold the sequences, the columns in whole sequences of each one's, padded to one number.
    """

    source_BA: Tensor
    real_BA: Tensor
    token_BA: Tensor
    position_BA: Tensor
    share: float
    parts: list[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What blocks see of their rows: columns first_BA to last_BA, both included."""

    first_BA: Tensor
    last_BA: Tensor

    def split(self, blocks: int) -> list[Context]:
        """So many blocks at a time."""
        starts = range(0, self.first_BA.shape[1], blocks)
        return [Context(self.first_BA[:, a : a + blocks], self.last_BA[:, a : a + blocks]) for a in starts]

    def seen(self, columns: int) -> Tensor:
        """[B, A, T] bool."""
        column_T = torch.arange(columns, device=self.first_BA.device)
        return (column_T >= self.first_BA[..., None]) & (column_T <= self.last_BA[..., None])


@dataclass(frozen=True, slots=True)
class Top:
    """The target's law at every position by its k likeliest tokens. log_rest_BT: log of the mass of all others together."""

    id_BTk: Tensor
    log_p_BTk: Tensor
    log_rest_BT: Tensor

    def to(self, device: torch.device) -> Top:
        return Top(self.id_BTk.to(device), self.log_p_BTk.to(device), self.log_rest_BT.to(device))


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Right-padded or packed sequences with the target's view of them, or one process's columns of them (`part`).

    document_BT: an id per document, -1 on padding. mask_BT: True where the *token at this position* is supervised.
    hidden: tapped target states by block number (`target.FINAL` for the post-norm output), each [B, T, H].
    top: the target's law, where the post-norm output is not there to give it.
    span, whole: of a part: which one it is, and the sequences, without states.
    """

    token_BT: Tensor
    position_BT: Tensor
    document_BT: Tensor
    mask_BT: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    top: Top | None = None
    span: Span | None = None
    whole: TrainBatch | None = None

    def part(self, group: Group, halo: int) -> TrainBatch:
        """This process's columns of a batch without states, which the group holds together, as many for each process; then
        `halo` more, which its labels may lie in. Where the sequences have ended there is padding."""
        own = -(-self.length // group.size)
        span = Span(group, own, halo)

        def cut(x_BT: Tensor, fill: int | bool) -> Tensor:
            return F.pad(x_BT, (0, own * group.size + halo - self.length), value=fill)[:, span.first : span.first + own + halo]

        token_BW, position_BW = cut(self.token_BT, 0), cut(self.position_BT, 0)
        return TrainBatch(token_BW, position_BW, cut(self.document_BT, -1), cut(self.mask_BT, False), span=span, whole=self)

    @property
    def length(self) -> int:
        """Of the whole sequences, T."""
        return (self.whole or self).token_BT.shape[1]

    def to(self, device: torch.device) -> TrainBatch:
        hidden = {k: h.to(device) for k, h in self.hidden.items()}
        token_BT, position_BT = self.token_BT.to(device), self.position_BT.to(device)
        document_BT, mask_BT = self.document_BT.to(device), self.mask_BT.to(device)
        top, whole = self.top and self.top.to(device), self.whole and self.whole.to(device)
        return TrainBatch(token_BT, position_BT, document_BT, mask_BT, hidden, top, self.span, whole)

    def future(self, k: int) -> Pairs:
        """Pairs (t, t + k) within one document whose label is supervised and whose root t + 1 is not padding."""
        source_M = self.labelled(k).flatten().nonzero()[:, 0]
        return Pairs(source_M, source_M + k)

    def labelled(self, k: int) -> Tensor:
        """[B, T] whether the token k positions later is of the same document and supervised; of a part's own columns alone."""
        T = self.token_BT.shape[1]
        if self.span is not None:
            assert k <= self.span.halo, (
                f"a label {k} positions on lies beyond the part of a sequence; Drafter.label_offset says less"
            )
        none_BT = torch.zeros_like(self.mask_BT)
        if k >= T:
            return none_BT
        same_BT = (self.document_BT[:, k:] == self.document_BT[:, : T - k]) & (self.document_BT[:, k:] >= 0)
        found_BT = torch.cat([same_BT & self.mask_BT[:, k:], none_BT[:, :k]], 1)
        return found_BT if self.span is None else torch.cat([found_BT[:, : self.span.own], none_BT[:, self.span.own :]], 1)

    def anchors(self, limit: int | None = None) -> Anchors:
        """Sources whose root is supervised, and the token after it; of each sequence at most `limit`, drawn at random.

        The draw is a function of the batch's tokens alone, so that it is the same on every process and device, and in a
        run that was resumed; another batch in which a sequence stands gives it other anchors.
        """
        if self.span is not None and self.whole is not None:
            return self._own(self.whole.anchors(limit), self.span)
        open_BT = self.labelled(1) & self.labelled(2)
        known, most = int(open_BT.sum()), int(open_BT.sum(1).max())
        if limit is None or most <= limit:
            return self._standing(open_BT, most, 1.0)
        chosen_BT = open_BT & (self._lot(open_BT) < limit)
        return self._standing(chosen_BT, limit, int(chosen_BT.sum()) / known)

    def nested(self, shares: Sequence[float]) -> list[tuple[int, Anchors]]:
        """(length, anchors) of all anchors whose chains have this length, where a share shares[i] of each sequence's is drawn
        to go on to length i + 1, from those that have come to i. Shares never grow; a length at which none ends is left out.

        Of 10 anchors and shares (0.8, 0.5, 0.5): 2 have no chain, 3 end at length 1, 5 at 3.
        """
        if self.span is not None and self.whole is not None:
            return [(length, self._own(anchors, self.span)) for length, anchors in self.whole.nested(shares)]
        open_BT = self.labelled(1) & self.labelled(2)
        kept_BK = (open_BT.sum(1, keepdim=True) * torch.tensor(shares, device=open_BT.device)).long()
        length_BT = (self._lot(open_BT)[..., None] < kept_BK[:, None]).sum(-1)
        ends = [i + 1 for i, (share, after) in enumerate(pairwise([*shares, 0.0])) if after < share]
        most = torch.stack([(length_BT == end).sum(1).max() for end in ends]).tolist() if ends else []
        return [(end, self._standing(length_BT == end, count, 1.0)) for end, count in zip(ends, most, strict=True)]

    def _lot(self, open_BT: Tensor) -> Tensor:
        """[B, T] where each open position comes in a random order of its sequence's, from 0; the others come after them."""
        B, T = open_BT.shape
        place_BT = torch.arange(1, B * T + 1, device=open_BT.device).view(B, T)
        digest = int(((self.token_BT + 1) * (place_BT * _ODD)).sum())
        order_BT = torch.rand(B, T, generator=torch.Generator().manual_seed(digest)).to(open_BT.device)
        return order_BT.masked_fill(~open_BT, 2.0).argsort(dim=1, stable=True).argsort(dim=1)

    def _standing(self, chosen_BT: Tensor, most: int, share: float) -> Anchors:
        """At the chosen positions, at most so many of each sequence."""
        T = chosen_BT.shape[1]
        column_BA = torch.arange(T, device=chosen_BT.device).where(chosen_BT, T).sort(1).values[:, : max(1, most)]
        real_BA = column_BA < T
        source_BA = column_BA.masked_fill(~real_BA, 0)
        token_BA, position_BA = self.after(1).gather(1, source_BA), self.position_BT.gather(1, source_BA) + 1
        return Anchors(source_BA, real_BA, token_BA, position_BA, share)

    def _own(self, anchors: Anchors, span: Span) -> Anchors:
        """Those of the whole sequences that stand in this process's columns."""
        owner_BA = torch.where(anchors.real_BA, anchors.source_BA // span.own, -1)
        mine = [owner_BA == rank for rank in range(span.group.size)]
        most = max(1, max(int(own_BA.sum(1).max()) for own_BA in mine))
        order = [(~own_BA).long().argsort(dim=1, stable=True)[:, :most] for own_BA in mine]
        own_BA = order[span.group.rank]
        real_BA = mine[span.group.rank].gather(1, own_BA)

        def of(x_BA: Tensor) -> Tensor:
            return x_BA.gather(1, own_BA)

        source_BA = (of(anchors.source_BA) - span.first).where(real_BA, 0)
        parts = [anchors.source_BA.gather(1, place_BA) for place_BA in order]
        return Anchors(source_BA, real_BA, of(anchors.token_BA), of(anchors.position_BA), anchors.share, parts)

    def ahead(self, anchors: Anchors, k: int) -> tuple[Tensor, Pairs]:
        """(place_M, pairs): `future(k)` of these sources alone, and the place of each in the flattened anchors."""
        T = self.token_BT.shape[1]
        has_BA = anchors.real_BA & self.labelled(k).gather(1, anchors.source_BA)
        place_M = has_BA.flatten().nonzero()[:, 0]
        row_B1 = torch.arange(len(has_BA), device=has_BA.device)[:, None]
        source_M = (row_B1 * T + anchors.source_BA).flatten()[place_M]
        return place_M, Pairs(source_M, source_M + k)

    def context(self, anchors: Anchors, root: bool = False) -> Context:
        """The positions before each anchor in its document: its source's, and those before; root: its own too. Of a part, in
        whole sequences, of the anchors of all processes."""
        document_BT = (self.whole or self).document_BT
        source_BA = anchors.source_BA if anchors.parts is None else torch.cat(anchors.parts, 1)
        column_T = torch.arange(self.length, device=document_BT.device)
        begins_BT = torch.ones_like(document_BT, dtype=torch.bool)
        begins_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
        start_BT = column_T.where(begins_BT, 0).cummax(1).values
        return Context(start_BT.gather(1, source_BA), source_BA + int(root))

    def sees(self) -> Documents | None:
        """What each position sees of its own document; None where no row holds two: to be causal says it all. Of a part, what
        the positions of whole sequences see."""
        document_BT = (self.whole or self).document_BT
        several = bool(((document_BT != document_BT[:, :1]) & (document_BT >= 0)).any())
        if self.span is None:
            return Documents(document_BT) if several else None
        number_BT = document_BT if several else torch.zeros_like(document_BT)
        missing = self.span.own * self.span.group.size - self.length
        return Documents(F.pad(number_BT, (0, missing), value=-1 if several else 0), self.span)

    def after(self, k: int) -> Tensor:
        """[B, T] the token k positions later; token 0 where the sequence has ended (no pair reads it there)."""
        if k == 0:
            return self.token_BT
        return torch.cat([self.token_BT[:, k:], torch.zeros_like(self.token_BT[:, :k])], dim=1)

    def law_at(self, label_M: Tensor) -> Tensor:
        """[M] where the target's output holds the law of these labels: one position before."""
        return label_M - 1

    def supervised(self) -> int:
        """Number of supervised tokens that some drafter could be asked for (a document's first token never is)."""
        own = self.token_BT.shape[1] if self.span is None else self.span.own
        return int((self.mask_BT & (self.document_BT >= 0))[:, :own].sum())


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step's predictions: the hidden state at each source, the label it stands for, and the head to apply.

    head: [m, H] -> [m, V] logits; called on chunks, so that no [M, V] tensor is ever whole. weight: of this step's loss, or
    of each of its predictions, [M].
    every_step: the one prediction stands for every draft depth (an autoregressive LM under teacher forcing).
    vocab_D: target ids of the drafter's own vocabulary, over which its logits are, ascending; None: the target's.
    aux: a further loss of this step, summed over its predictions and weighted already.
    counted: False for a part that only the loss knows, of which no draft is offered to the target.
    offers: the head gives a finite logit to so many tokens of each prediction alone; None: to all.
    confidence: [m, H] -> [m] logits of the draft's being accepted, which the objective teaches the counted acceptance.
    """

    step: int
    source_M: Tensor
    label_M: Tensor
    hidden_MH: Tensor
    head: Callable[[Tensor], Tensor]
    weight: float | Tensor = 1.0
    every_step: bool = False
    vocab_D: Tensor | None = None
    aux: Tensor | None = None
    counted: bool = True
    offers: int | None = None
    confidence: Callable[[Tensor], Tensor] | None = None

    def whole(self, logits_MD: Tensor, vocab: int) -> Tensor:
        """[M, V] the head's logits over the target's vocabulary, minus infinity where the drafter has none."""
        return logits_MD if self.vocab_D is None else remap_logits(logits_MD, self.vocab_D, vocab)
