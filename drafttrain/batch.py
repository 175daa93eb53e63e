"""Floor 0: training batches, and the only code that shifts tokens against positions.

Shapes: B sequences, T positions, H hidden, M (source, label) pairs, V vocabulary.

Worked example: one sequence of tokens `a b c d e`, all supervised.

    position          0   1   2   3   4
    future(2).source  0   1   2              a drafter standing at 0 holds h[0] and knows b (the root)
    future(2).label   2   3   4              and drafts c: the token at label 2, whose law is the target's output at 1
    after(1)          b   c   d   e   -
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """Flat indices into [B * T]: where a prediction is made, and the token it predicts."""

    source_M: Tensor
    label_M: Tensor


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
        B, T = self.token_BT.shape
        if k >= T:
            empty_M = torch.empty(0, dtype=torch.long, device=self.token_BT.device)
            return Pairs(empty_M, empty_M)
        same_BT = (self.document_BT[:, k:] == self.document_BT[:, : T - k]) & (self.document_BT[:, k:] >= 0)
        row_M, column_M = (same_BT & self.mask_BT[:, k:]).nonzero(as_tuple=True)
        source_M = row_M * T + column_M
        return Pairs(source_M, source_M + k)

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

    head: [m, H] -> [m, V] logits; called on chunks, so that no [M, V] tensor is ever whole. weight: of this step's loss.
    every_step: the one prediction stands for every draft depth (an autoregressive LM under teacher forcing).
    """

    step: int
    source_M: Tensor
    label_M: Tensor
    hidden_MH: Tensor
    head: Callable[[Tensor], Tensor]
    weight: float = 1.0
    every_step: bool = False
