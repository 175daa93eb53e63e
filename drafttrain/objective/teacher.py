"""The target's distribution at chosen positions, from its post-norm states or from its k likeliest tokens.

Shapes: P = B * T flat positions, U positions of a chunk, C predictions scored at once, H hidden, V vocabulary, D some of its
tokens, k kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from drafttrain.model.batch import Prediction, Top, TrainBatch
from drafttrain.model.target import FINAL, Target
from drafttrain.objective.chunks import Index
from drafttrain.ops.divergence import Summary, summary

WHOLE = slice(None)


class TargetChunk:
    """The target's logits at some positions. What several predictions need of them is computed once."""

    def __init__(self, logits_UV: Tensor) -> None:
        self.logits_UV = logits_UV
        self._columns: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def summary(self) -> Summary:
        """Log-sum-exp and likeliest token of each row."""
        return summary(self.logits_UV)

    def columns(self, vocab_D: Tensor) -> Tensor:
        """[U, D] the logits of these tokens."""
        entry = self._columns.get(id(vocab_D))
        if entry is None:
            entry = self._columns[id(vocab_D)] = vocab_D, self.logits_UV.index_select(1, vocab_D)
        return entry[1]


class TargetRows:
    """The target's logits for the tokens that some predictions predict: rows of a chunk."""

    def __init__(self, chunk: TargetChunk, place_C: Index = WHOLE) -> None:
        self.chunk, self.place_C = chunk, place_C

    def logits(self) -> Tensor:
        """[C, V]."""
        return self.chunk.logits_UV[self.place_C]

    def best(self) -> Tensor:
        """[C] the likeliest token."""
        return self.chunk.summary.best_C[self.place_C]

    def log_sum(self) -> Tensor:
        """[C] the log-sum-exp of all logits."""
        return self.chunk.summary.log_sum_C[self.place_C]

    def columns(self, vocab_D: Tensor) -> Tensor:
        """[C, D] the logits of these tokens."""
        return self.chunk.columns(vocab_D)[self.place_C]

    def of(self, token_CD: Tensor) -> Tensor:
        """[C, D] the logits of each prediction's own tokens."""
        if isinstance(self.place_C, slice):
            return self.logits().gather(1, token_CD)
        return self.chunk.logits_UV[self.place_C[:, None], token_CD]


# (place within the chunk's positions, the predictions' step, the drafter's own logits [C, D] by its head) -> the target's
Rows = Callable[[Index, Prediction, Tensor], TargetRows]


class Distribution(Protocol):
    """The target's distribution, computed chunk by chunk; a [P, V] tensor never exists."""

    def entropy(self, place_U: Tensor) -> Tensor:
        """[U] the entropy at these flat positions, in nats."""
        ...

    def at(self, place_U: Tensor) -> Rows:
        """The logits, or log-probabilities, at these flat positions, for predictions of the tokens that follow there."""
        ...


class FullDistribution:
    """The exact distribution: the target's head on its post-norm states, once for all predictions of a chunk."""

    def __init__(self, final_PH: Tensor, target: Target) -> None:
        self.final_PH, self.target = final_PH, target

    def entropy(self, place_U: Tensor) -> Tensor:
        return torch.special.entr(self.target.head(self.final_PH[place_U]).float().softmax(-1)).sum(-1)

    def at(self, place_U: Tensor) -> Rows:
        chunk = TargetChunk(self.target.head(self.final_PH[place_U]))

        def rows(place_C: Index, prediction: Prediction, draft_CD: Tensor) -> TargetRows:
            return TargetRows(chunk, place_C)

        return rows


class TopKDistribution:
    """The k likeliest tokens with their stored probabilities; all other tokens share the rest in the drafter's proportions.

    Of all distributions that agree with what is stored, this one is closest to the drafter's q. A divergence from it equals the
    divergence between p and q with all other tokens merged into one outcome, the ghost token of arXiv 2503.16870. It never
    exceeds the true divergence. Its gradient with the distribution held fixed is the full gradient, because the tail is at its
    minimum. sum min(p, q) is never below the true acceptance, and exceeds it by at most the mass of the other tokens.
    """

    def __init__(self, top: Top, vocab: int) -> None:
        self.id_Pk, self.log_p_Pk = top.id_BTk.flatten(0, 1), top.log_p_BTk.flatten(0, 1)
        self.vocab, self.log_rest_P = vocab, top.log_rest_BT.flatten()

    def entropy(self, place_U: Tensor) -> Tensor:
        """All other tokens count as one."""
        log_p_UX = torch.cat([self.log_p_Pk[place_U], self.log_rest_P[place_U, None]], -1)
        return torch.special.entr(log_p_UX.exp()).sum(-1)

    def at(self, place_U: Tensor) -> Rows:
        def rows(place_C: Index, prediction: Prediction, draft_CD: Tensor) -> TargetRows:
            return TargetRows(TargetChunk(self.logits(place_U[place_C], prediction, draft_CD)))

        return rows

    def logits(self, place_C: Tensor, prediction: Prediction, draft_CD: Tensor) -> Tensor:
        """[C, V] log-probabilities at these flat positions. draft_CD: the drafter's own logits for the tokens that follow."""
        id_Ck = self.id_Pk[place_C]
        tail_CV = prediction.whole(draft_CD, self.vocab).float().scatter(1, id_Ck, -torch.inf)
        none_C1 = tail_CV.amax(-1, keepdim=True) == -torch.inf  # the drafter has no other token: spread the mass evenly
        tail_CV = torch.where(none_C1, torch.zeros_like(tail_CV).scatter_(1, id_Ck, -torch.inf), tail_CV)
        tail_CV = tail_CV.log_softmax(-1) + self.log_rest_P[place_C, None]
        return tail_CV.scatter_(1, id_Ck, self.log_p_Pk[place_C])


def target_distribution(batch: TrainBatch, target: Target) -> Distribution:
    """The batch's target distribution: top-k where the batch stores that, else from its final states."""
    if batch.top is not None:
        return TopKDistribution(batch.top, target.shape.vocab_size)
    return FullDistribution(batch.hidden[FINAL].flatten(0, 1), target)
