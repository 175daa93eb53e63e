"""Floor 0: training batches, and the only code that shifts tokens against positions.

Shapes: B sequences, T positions, A anchors of a sequence, H hidden, M (source, label) pairs, V vocabulary.

Worked example: one sequence of tokens `a b c d e`, all supervised.

    position          0   1   2   3   4
    future(2).source  0   1   2              a drafter standing at 0 holds h[0] and knows b (the root)
    future(2).label   2   3   4              and drafts c: the token at label 2, whose law is the target's output at 1
    after(1)          b   c   d   e   -
    anchors().source  0   1   2              a block that stands at 0 begins with the root b, its anchor, at position 1;
    ahead(.., 3)      3   4                  it sees the target's states at 0 alone, and its second draft is the token at 3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    """

    source_BA: Tensor
    real_BA: Tensor
    token_BA: Tensor
    position_BA: Tensor
    share: float


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Right-padded or packed sequences with the target's view of them.

    document_BT: an id per document, -1 on padding. mask_BT: True where the *token at this position* is supervised.
    hidden: tapped target states by block number (`target.FINAL` for the post-norm output), each [B, T, H].
    """

    token_BT: Tensor
    position_BT: Tensor
    document_BT: Tensor
    mask_BT: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> TrainBatch:
        hidden = {k: h.to(device) for k, h in self.hidden.items()}
        token_BT, position_BT = self.token_BT.to(device), self.position_BT.to(device)
        return TrainBatch(token_BT, position_BT, self.document_BT.to(device), self.mask_BT.to(device), hidden)

    def future(self, k: int) -> Pairs:
        """Pairs (t, t + k) within one document whose label is supervised and whose root t + 1 is not padding."""
        source_M = self.labelled(k).flatten().nonzero()[:, 0]
        return Pairs(source_M, source_M + k)

    def labelled(self, k: int) -> Tensor:
        """[B, T] whether the token k positions later is of the same document and supervised."""
        T = self.token_BT.shape[1]
        none_BT = torch.zeros_like(self.mask_BT)
        if k >= T:
            return none_BT
        same_BT = (self.document_BT[:, k:] == self.document_BT[:, : T - k]) & (self.document_BT[:, k:] >= 0)
        return torch.cat([same_BT & self.mask_BT[:, k:], none_BT[:, :k]], 1)

    def anchors(self, limit: int | None = None) -> Anchors:
        """Sources whose root is supervised, and the token after it; of each sequence at most `limit`, drawn at random.

        The draw is a function of the batch's tokens alone, so that it is the same on every process and device, and in a
        run that was resumed; another batch in which a sequence stands gives it other anchors.
        """
        B, T = self.token_BT.shape
        open_BT, order_BT = self.labelled(1) & self.labelled(2), torch.zeros(B, T)
        known = int(open_BT.sum())
        most = int(open_BT.sum(1).max())
        if limit is not None and limit < most:
            place_BT = torch.arange(1, B * T + 1, device=self.token_BT.device).view(B, T)
            digest = int(((self.token_BT + 1) * (place_BT * _ODD)).sum())
            order_BT, most = torch.rand(B, T, generator=torch.Generator().manual_seed(digest)), limit
        order_BT = order_BT.to(open_BT.device).masked_fill(~open_BT, 2.0)  # what may not be drawn comes last
        drawn_BA = order_BT.argsort(dim=1, stable=True)[:, : max(1, most)]
        column_BA = torch.where(open_BT.gather(1, drawn_BA), drawn_BA, T).sort(1).values
        real_BA = column_BA < T
        source_BA = column_BA.masked_fill(~real_BA, 0)
        token_BA, position_BA = self.after(1).gather(1, source_BA), self.position_BT.gather(1, source_BA) + 1
        return Anchors(source_BA, real_BA, token_BA, position_BA, int(real_BA.sum()) / known if known else 1.0)

    def ahead(self, anchors: Anchors, k: int) -> tuple[Tensor, Pairs]:
        """(place_M, pairs): `future(k)` of these sources alone, and the place of each in the flattened anchors."""
        T = self.token_BT.shape[1]
        has_BA = anchors.real_BA & self.labelled(k).gather(1, anchors.source_BA)
        place_M = has_BA.flatten().nonzero()[:, 0]
        row_B1 = torch.arange(len(has_BA), device=has_BA.device)[:, None]
        source_M = (row_B1 * T + anchors.source_BA).flatten()[place_M]
        return place_M, Pairs(source_M, source_M + k)

    def context(self, anchors: Anchors) -> Tensor:
        """[B, A, T] the positions before each anchor in its document: its source's, and those before."""
        column_T = torch.arange(self.token_BT.shape[1], device=self.token_BT.device)
        document_BA = self.document_BT.gather(1, anchors.source_BA)
        same_BAT = self.document_BT[:, None] == document_BA[..., None]
        return same_BAT & (column_T <= anchors.source_BA[..., None])

    def sees(self) -> Tensor | None:
        """[B, T, T] what each position sees of its own document; None where no row holds two: the causal mask says it all."""
        first_B1 = self.document_BT[:, :1]
        if not bool(((self.document_BT != first_B1) & (self.document_BT >= 0)).any()):
            return None
        column_T = torch.arange(self.token_BT.shape[1], device=self.token_BT.device)
        return (self.document_BT[:, None] == self.document_BT[..., None]) & (column_T <= column_T[:, None])

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
        return int((self.mask_BT & (self.document_BT >= 0)).sum())


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step's predictions: the hidden state at each source, the label it stands for, and the head to apply.

    head: [m, H] -> [m, V] logits; called on chunks, so that no [M, V] tensor is ever whole. weight: of this step's loss, or
    of each of its predictions, [M].
    every_step: the one prediction stands for every draft depth (an autoregressive LM under teacher forcing).
    vocab_D: target ids of the drafter's own vocabulary, over which its logits are, ascending; None: the target's.
    aux: a further loss of this step, summed over its predictions and weighted already.
    counted: False for a part that only the loss knows, of which no draft is offered to the target.
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

    def whole(self, logits_MD: Tensor, vocab: int) -> Tensor:
        """[M, V] the head's logits over the target's vocabulary, minus infinity where the drafter has none."""
        return logits_MD if self.vocab_D is None else remap_logits(logits_MD, self.vocab_D, vocab)
