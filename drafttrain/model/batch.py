"""Training batches, and the only code that shifts tokens against positions.

Shapes: B sequences, T positions, A anchors of a sequence, H hidden, M (source, label) pairs, V vocabulary, k likeliest tokens.

Worked example: one sequence of tokens `a b c d e`, all supervised.

    position          0   1   2   3   4
    future(2).source  0   1   2              a drafter at source 0 holds h[0] and knows b, the root;
    future(2).label   2   3   4              it drafts c, the token at label 2; the target's output at 1 is its distribution
    after(1)          b   c   d   e   -
    anchors().source  0   1   2              a block with source 0 begins at position 1 with the root b, its anchor;
    future_of(.., 3)  3   4                  it sees the target's states at 0 alone, and its second draft is the token at 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.sequence_shard import Group, Span
from drafttrain.model.masks import Documents
from drafttrain.ops.top import remap_logits


def moved(x: Tensor, device: torch.device) -> Tensor:
    """x on this device; a copy from the host to a GPU waits for nothing."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.contiguous().pin_memory().to(device, non_blocking=True)  # an expanded tensor cannot be pinned
    return x.to(device)


_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd multiplier that spreads a batch's digest over all bits


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sources and labels of predictions, as flat indices into [B * T]."""

    source_M: Tensor  # where the prediction is made
    label_M: Tensor  # the token that it predicts


@dataclass(frozen=True, slots=True)
class Anchors:
    """Some sources of each sequence, in order. A block drafter begins one block at the root of each."""

    source_BA: Tensor  # columns; 0 where real_BA is False
    real_BA: Tensor  # False for padding
    token_BA: Tensor  # of the roots
    position_BA: Tensor  # of the roots
    share: float  # these anchors / all possible ones
    parts: list[Tensor] | None = None  # each process's source columns where several hold the sequences; equally padded
    visible_BA: Tensor | None = None  # true tokens that a block begins with; None: the root alone
    host: Anchors | None = None  # the same on the host, where these are on another device

    def to(self, device: torch.device) -> Anchors:
        source_BA, real_BA = moved(self.source_BA, device), moved(self.real_BA, device)
        token_BA, position_BA = moved(self.token_BA, device), moved(self.position_BA, device)
        parts = self.parts and [moved(part_BA, device) for part_BA in self.parts]
        visible_BA = None if self.visible_BA is None else moved(self.visible_BA, device)
        return Anchors(source_BA, real_BA, token_BA, position_BA, self.share, parts, visible_BA, self)


@dataclass(frozen=True, slots=True)
class Context:
    """The columns of its row that each block sees."""

    first_BA: Tensor
    last_BA: Tensor  # included

    def split(self, blocks: int) -> list[Context]:
        """The context of each group of at most `blocks` blocks."""
        starts = range(0, self.first_BA.shape[1], blocks)
        return [Context(self.first_BA[:, a : a + blocks], self.last_BA[:, a : a + blocks]) for a in starts]

    def seen(self, columns: int) -> Tensor:
        """[B, A, T] bool: whether a block sees a column."""
        column_T = torch.arange(columns, device=self.first_BA.device)
        return (column_T >= self.first_BA[..., None]) & (column_T <= self.last_BA[..., None])


@dataclass(frozen=True, slots=True)
class Top:
    """The target's distribution at every position, by its k likeliest tokens."""

    id_BTk: Tensor
    log_p_BTk: Tensor
    log_rest_BT: Tensor  # log of the probability of all other tokens together

    def to(self, device: torch.device) -> Top:
        return Top(self.id_BTk.to(device), self.log_p_BTk.to(device), self.log_rest_BT.to(device))


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Right-padded or packed sequences with the target's states, or one process's columns of them (`part`)."""

    token_BT: Tensor
    position_BT: Tensor
    document_BT: Tensor  # number of the document; -1 on padding
    mask_BT: Tensor  # True where the *token at this position* is supervised
    hidden: dict[int, Tensor] = field(default_factory=dict)  # states [B, T, H] by block number; `target.FINAL`: post-norm
    top: Top | None = None  # the target's distribution, where the post-norm output is absent
    span: Span | None = None  # the process's columns, of a part
    whole: TrainBatch | None = None  # the whole sequences without states, of a part
    progress: float = 1.0  # share of the training steps that are done after this one, for losses that change on the way
    # The same on the host, without states, where this batch is on another device. What follows from tokens, documents and masks
    # alone is found there: nothing waits for the device, which works ahead.
    host: TrainBatch | None = None
    placed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)  # see `on_host`
    adapters: tuple[str | None, ...] = ()  # each row's LoRA adapter of the target, by name; None: the target itself; (): of all

    def part(self, group: Group, halo: int) -> TrainBatch:
        """This process's columns of a batch without states that the processes of the group hold together.

        Each process has the same number of columns, then `halo` more that its labels may be in. Padding follows the sequences.
        """
        local_columns = -(-self.length // group.size)
        span = Span(group, local_columns, halo)

        def cut(x_BT: Tensor, fill: int | bool) -> Tensor:
            return F.pad(x_BT, (0, local_columns * group.size + halo - self.length), value=fill)[
                :, span.first : span.first + local_columns + halo
            ]

        token_BW, position_BW = cut(self.token_BT, 0), cut(self.position_BT, 0)
        document_BW, mask_BW = cut(self.document_BT, -1), cut(self.mask_BT, False)
        return TrainBatch(token_BW, position_BW, document_BW, mask_BW, span=span, whole=self, adapters=self.adapters)

    @property
    def length(self) -> int:
        """Positions of the whole sequences, T."""
        return (self.whole or self).token_BT.shape[1]

    @property
    def longest(self) -> int:
        """Positions of the longest of the whole sequences. `length` is more where all are padded to a round number."""
        if self.host is not None:
            return self.host.longest
        return int(((self.whole or self).document_BT >= 0).any(0).sum())

    @property
    def digest(self) -> int:
        """A number that follows from the tokens of the whole sequences: a seed that every process and a resumed run has."""
        if self.host is not None:
            return self.host.digest
        token_BT = (self.whole or self).token_BT[:, : self.longest]
        index_P = torch.arange(1, token_BT.numel() + 1, device=token_BT.device)
        return int(((token_BT + 1) * (index_P * _ODD).view_as(token_BT)).sum())

    def to(self, device: torch.device) -> TrainBatch:
        hidden = {k: h.to(device) for k, h in self.hidden.items()}
        token_BT, position_BT = moved(self.token_BT, device), moved(self.position_BT, device)
        document_BT, mask_BT = moved(self.document_BT, device), moved(self.mask_BT, device)
        top, full_batch = self.top and self.top.to(device), self.whole and self.whole.to(device)
        host = None if device.type == "cpu" else self.host
        if self.token_BT.device.type == "cpu" and device.type != "cpu":
            host = replace(self, hidden={}, top=None, placed={})
        numbers = (token_BT, position_BT, document_BT, mask_BT)
        return TrainBatch(*numbers, hidden, top, self.span, full_batch, self.progress, host, adapters=self.adapters)

    def nonfinite(self) -> Tensor:
        """[B] whether the target's states of a row's documents have a value that is not finite. Waits for nothing."""
        nonfinite_BT = torch.zeros_like(self.mask_BT)
        for state_BTH in self.hidden.values():  # a sum is finite where its terms are, and costs a tenth of looking at each
            nonfinite_BT = nonfinite_BT | ~state_BTH.detach().sum(-1, dtype=torch.float32).isfinite()
        return (nonfinite_BT & (self.document_BT >= 0)).any(1)

    def without(self, rows: Sequence[int], token: int) -> TrainBatch:
        """The batch with these rows as padding, which nothing is learnt from. token: takes the place of their tokens.

        A batch keeps its shape and every process its number of micro-batches. States, if there are any, become zeros.
        """
        dropped_B = torch.zeros(len(self.token_BT), dtype=torch.bool, device=self.token_BT.device)
        dropped_B[list(rows)] = True

        def filled(x: Tensor, value: float) -> Tensor:
            return x.masked_fill(dropped_B.view(-1, *[1] * (x.ndim - 1)), value)

        top = self.top and Top(filled(self.top.id_BTk, 0), filled(self.top.log_p_BTk, 0), filled(self.top.log_rest_BT, 0))
        return replace(
            self,
            token_BT=filled(self.token_BT, token),
            document_BT=filled(self.document_BT, -1),
            mask_BT=filled(self.mask_BT, False),
            hidden={key: filled(state_BTH, 0.0) for key, state_BTH in self.hidden.items()},
            top=top,
            host=self.host and self.host.without(rows, token),
            whole=self.whole and self.whole.without(rows, token),
            placed={},
        )

    def only(self, rows: Sequence[int]) -> TrainBatch:
        """These rows of a batch without states, with all columns."""
        index_R = torch.tensor(rows, device=self.token_BT.device)
        names = ("token_BT", "position_BT", "document_BT", "mask_BT")
        return replace(
            self,
            **{name: getattr(self, name)[index_R] for name in names},
            whole=self.whole and self.whole.only(rows),
            host=self.host and self.host.only(rows),
            adapters=tuple(self.adapters[row] for row in rows),
            placed={},
        )

    def place(self, x: Tensor) -> Tensor:
        """x, of `host`, on this batch's device."""
        device_copy = moved(x, self.token_BT.device)
        self.placed[id(device_copy)] = device_copy, x
        return device_copy

    def on_host(self, x: Tensor) -> Tensor:
        """x on the host; without waiting for the device where it was found on the host."""
        return self.placed[id(x)][1] if id(x) in self.placed else x.cpu()

    def joined(self, indices: Sequence[Tensor]) -> Tensor:
        """One after the other; known on the host where they are."""
        return torch.cat(list(indices)) if self.host is None else self.place(torch.cat([self.on_host(x) for x in indices]))

    def future(self, k: int) -> Pairs:
        """Pairs (t, t + k) within one document whose label is supervised."""
        if self.host is not None:
            pairs = self.host.future(k)
            return Pairs(self.place(pairs.source_M), self.place(pairs.label_M))
        source_M = self.labelled(k).flatten().nonzero()[:, 0]
        return Pairs(source_M, source_M + k)

    def labelled(self, k: int) -> Tensor:
        """[B, T] whether the token k positions later is supervised and of the same document; False in a part's halo."""
        T = self.token_BT.shape[1]
        if self.span is not None:
            assert k <= self.span.halo, f"label {k} is beyond the part of a sequence; Drafter.label_offset is smaller"
        none_BT = torch.zeros_like(self.mask_BT)
        if k >= T:
            return none_BT
        same_document_BT = (self.document_BT[:, k:] == self.document_BT[:, : T - k]) & (self.document_BT[:, k:] >= 0)
        labelled_BT = torch.cat([same_document_BT & self.mask_BT[:, k:], none_BT[:, :k]], 1)
        return (
            labelled_BT if self.span is None else torch.cat([labelled_BT[:, : self.span.own], none_BT[:, self.span.own :]], 1)
        )

    def anchors(self, limit: int | None = None, visible: Sequence[float] = ()) -> Anchors:
        """Sources whose root and the token after it are supervised; of each sequence at most `limit`, chosen at random.

        visible[i]: how likely a block is to begin with i + 1 true tokens, next to other numbers; empty: with the root alone.
        The choice depends on the batch's tokens alone: it is the same on every process and device, and in a resumed run.
        In another batch the same sequence gets other anchors.
        """
        if self.host is not None:
            return self.host.anchors(limit, visible).to(self.token_BT.device)
        if self.span is not None and self.whole is not None:
            return self._own_anchors(self.whole.anchors(limit, visible), self.span)
        candidate_BT = self.labelled(1) & self.labelled(2)
        candidates, max_per_row = int(candidate_BT.sum()), int(candidate_BT.sum(1).max())
        if limit is None or max_per_row <= limit:
            return self._begun(self._anchors_at(candidate_BT, max_per_row, 1.0), visible)
        chosen_BT = candidate_BT & (self._random_order(candidate_BT) < limit)
        return self._begun(self._anchors_at(chosen_BT, limit, int(chosen_BT.sum()) / candidates), visible)

    def _begun(self, anchors: Anchors, visible: Sequence[float]) -> Anchors:
        """The anchors with a number of true tokens, drawn for each position."""
        if not visible:
            return anchors
        generator, (B, T) = torch.Generator().manual_seed(self.digest ^ 1), self.token_BT.shape
        drawn_N = torch.multinomial(torch.tensor(visible), B * self.longest, replacement=True, generator=generator) + 1
        drawn_BT = F.pad(drawn_N.view(B, -1), (0, T - self.longest), value=1).to(anchors.source_BA.device)
        return replace(anchors, visible_BA=drawn_BT.gather(1, anchors.source_BA))

    def nested(self, shares: Sequence[float]) -> list[tuple[int, Anchors]]:
        """(length, anchors) of the anchors whose chains have this length; a length that no chain has is left out.

        shares[i]: the share of a sequence's anchors whose chains reach length i + 1; shares never grow. Anchors are chosen at
        random. Of 10 anchors and shares (0.8, 0.5, 0.5), 2 have no chain, 3 have length 1, 5 have length 3.
        """
        if self.host is not None:
            return [(length, anchors.to(self.token_BT.device)) for length, anchors in self.host.nested(shares)]
        if self.span is not None and self.whole is not None:
            return [(length, self._own_anchors(anchors, self.span)) for length, anchors in self.whole.nested(shares)]
        candidate_BT = self.labelled(1) & self.labelled(2)
        quota_BK = (candidate_BT.sum(1, keepdim=True) * torch.tensor(shares, device=candidate_BT.device)).long()
        length_BT = (self._random_order(candidate_BT)[..., None] < quota_BK[:, None]).sum(-1)
        ends = [i + 1 for i, (share, next_share) in enumerate(pairwise([*shares, 0.0])) if next_share < share]
        max_counts = torch.stack([(length_BT == end).sum(1).max() for end in ends]).tolist() if ends else []
        return [(end, self._anchors_at(length_BT == end, count, 1.0)) for end, count in zip(ends, max_counts, strict=True)]

    def _random_order(self, candidate_BT: Tensor) -> Tensor:
        """[B, T] place of each open position in a random order of its sequence, from 0; the other positions follow."""
        generator = torch.Generator().manual_seed(self.digest)
        (B, T), longest = candidate_BT.shape, self.longest  # further columns are padding of all rows
        order_BT = F.pad(torch.rand((B, longest), generator=generator), (0, T - longest)).to(candidate_BT.device)
        return order_BT.masked_fill(~candidate_BT, 2.0).argsort(dim=1, stable=True).argsort(dim=1)

    def _anchors_at(self, chosen_BT: Tensor, max_per_row: int, share: float) -> Anchors:
        """Anchors whose sources are the chosen positions; `max_per_row`: the largest number of a sequence."""
        T = chosen_BT.shape[1]
        column_BA = torch.arange(T, device=chosen_BT.device).where(chosen_BT, T).sort(1).values[:, : max(1, max_per_row)]
        real_BA = column_BA < T
        source_BA = column_BA.masked_fill(~real_BA, 0)
        token_BA, position_BA = self.after(1).gather(1, source_BA), self.position_BT.gather(1, source_BA) + 1
        return Anchors(source_BA, real_BA, token_BA, position_BA, share)

    def _own_anchors(self, anchors: Anchors, span: Span) -> Anchors:
        """The anchors of the whole sequences whose sources are in this process's columns."""
        owner_BA = torch.where(anchors.real_BA, anchors.source_BA // span.own, -1)
        owned_by_rank = [owner_BA == rank for rank in range(span.group.size)]
        max_per_row = max(1, max(int(owned_BA.sum(1).max()) for owned_BA in owned_by_rank))
        order = [(~owned_BA).long().argsort(dim=1, stable=True)[:, :max_per_row] for owned_BA in owned_by_rank]
        local_BA = order[span.group.rank]
        real_BA = owned_by_rank[span.group.rank].gather(1, local_BA)

        def of(x_BA: Tensor) -> Tensor:
            return x_BA.gather(1, local_BA)

        source_BA = (of(anchors.source_BA) - span.first).where(real_BA, 0)
        parts = [anchors.source_BA.gather(1, index_BA) for index_BA in order]
        visible_BA = None if anchors.visible_BA is None else of(anchors.visible_BA)
        return Anchors(source_BA, real_BA, of(anchors.token_BA), of(anchors.position_BA), anchors.share, parts, visible_BA)

    def future_of(self, anchors: Anchors, k: int, unbroken: bool = False) -> tuple[Tensor, Pairs]:
        """(index_M, pairs): `future(k)` of these sources alone, without true tokens that their blocks begin with; index_M: each
        one's index in the flattened anchors.

        unbroken: only where every token from the root to the label is supervised.
        """
        if self.host is not None and anchors.host is not None:
            index_M, pairs = self.host.future_of(anchors.host, k, unbroken)
            return self.place(index_M), Pairs(self.place(pairs.source_M), self.place(pairs.label_M))
        T, valid_BA = self.token_BT.shape[1], anchors.real_BA
        if anchors.visible_BA is not None:
            valid_BA = valid_BA & (anchors.visible_BA < k)
        for offset in range(1 if unbroken else k, k + 1):
            valid_BA = valid_BA & self.labelled(offset).gather(1, anchors.source_BA)
        index_M = valid_BA.flatten().nonzero()[:, 0]
        row_B1 = torch.arange(len(valid_BA), device=valid_BA.device)[:, None]
        source_M = (row_B1 * T + anchors.source_BA).flatten()[index_M]
        return index_M, Pairs(source_M, source_M + k)

    def context(self, anchors: Anchors, root: bool = False) -> Context:
        """The columns of each anchor's document up to its source; root: the anchor's own column too.

        For a part: columns of the whole sequences, for the anchors of all processes.
        """
        document_BT = (self.whole or self).document_BT
        source_BA = anchors.source_BA if anchors.parts is None else torch.cat(anchors.parts, 1)
        column_T = torch.arange(self.length, device=document_BT.device)
        begins_BT = torch.ones_like(document_BT, dtype=torch.bool)
        begins_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
        start_BT = column_T.where(begins_BT, 0).cummax(1).values
        return Context(start_BT.gather(1, source_BA), source_BA + int(root))

    def sees(self) -> Documents | None:
        """The documents within which positions attend; None where no row holds two, so that causal attention is enough.

        For a part: the documents of the whole sequences.
        """
        if self.host is not None:
            documents = self.host.sees()
            return documents and Documents(moved(documents.number_BT, self.token_BT.device), self.span, documents.number_BT)
        document_BT = (self.whole or self).document_BT
        multiple_documents = bool(((document_BT != document_BT[:, :1]) & (document_BT >= 0)).any())
        if self.span is None:
            return Documents(document_BT) if multiple_documents else None
        number_BT = document_BT if multiple_documents else torch.zeros_like(document_BT)
        missing = self.span.own * self.span.group.size - self.length
        return Documents(F.pad(number_BT, (0, missing), value=-1 if multiple_documents else 0), self.span)

    def after(self, k: int) -> Tensor:
        """[B, T] the token k positions later; token 0 past the end of the sequence, where no pair reads it."""
        if k == 0:
            return self.token_BT
        return torch.cat([self.token_BT[:, k:], torch.zeros_like(self.token_BT[:, :k])], dim=1)

    def teacher_index(self, label_M: Tensor) -> Tensor:
        """[M] positions whose target output is the distribution of these labels: one position before each."""
        return label_M - 1

    def supervised(self) -> int:
        """Number of supervised tokens that a drafter can predict; a document's first token is never one."""
        if self.host is not None:
            return self.host.supervised()
        columns = self.token_BT.shape[1] if self.span is None else self.span.own
        return int((self.mask_BT & (self.document_BT >= 0))[:, :columns].sum())


@dataclass(frozen=True, slots=True)
class Shared:
    """Which of a shared head's logits a step's predictions have.

    A shared head makes all logits of some rows, of blocks for example, because they share its work. It gives several kinds of
    logits for the same predictions, at most one for each row and column.
    """

    head: Callable[[Tensor, slice | Tensor], Sequence[Tensor]]  # ([n, ...] some rows, which) -> for each kind [n, J, V]
    kind: int
    column: int  # the step's, of J
    row_M: Tensor  # each prediction's

    def logits(self, input_NX: Tensor) -> Tensor:
        """[M, V] of these predictions alone. input_NX: all rows."""
        logits_NJV = self.head(input_NX, slice(None))[self.kind]
        return logits_NJV[self.row_M, self.column]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predictions of one step: a hidden state and a label for each source, and the head that gives logits.

    The head's result depends on its input and on parameters alone: the objective calls it on some predictions at a time, of
    several steps where they have the same head, outside the graph that made the states. Steps with one head have one vocab_D.
    """

    step: int  # draft depth, from 0
    source_M: Tensor
    label_M: Tensor
    hidden_MH: Tensor  # at each source
    head: Callable[[Tensor], Tensor]  # [m, H] -> [m, V] logits; called on chunks, so that there is never an [M, V] tensor
    weight: float | Tensor = 1.0  # of this step's loss, or of each prediction, [M]
    every_step: bool = False  # the predictions are those of every draft depth (an autoregressive LM under teacher forcing)
    vocab_D: Tensor | None = None  # ascending target ids of the drafter's own vocabulary; None: the target's vocabulary
    aux: Tensor | None = None  # a further loss of this step, weighted and summed over its predictions
    counted: bool = True  # False: part of the loss alone; no such draft is offered to the target
    offers: int | None = None  # tokens of each prediction with a finite logit; None: all
    confidence: Callable[[Tensor], Tensor] | None = None  # [m, H] -> [m] logits of acceptance, trained on counts
    shared: Shared | None = None  # in training: hidden_MH is then the shared head's whole input [N, ...], head `shared.logits`

    def whole(self, logits_MD: Tensor, vocab: int) -> Tensor:
        """[M, V] the head's logits over the target's vocabulary; minus infinity outside the drafter's."""
        return logits_MD if self.vocab_D is None else remap_logits(logits_MD, self.vocab_D, vocab)
