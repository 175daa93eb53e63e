"""The target's distribution at chosen positions, from its post-norm states or from its k likeliest tokens.

Shapes: P = B * T flat positions, C a chunk of them, H hidden, V vocabulary, D the drafter's own part of it, k kept tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from drafttrain.model.batch import Prediction, Top, TrainBatch
from drafttrain.model.target import FINAL, Target


class Distribution(Protocol):
    """The target's distribution, computed chunk by chunk; a [P, V] tensor never exists."""

    def logits(self, place_C: Tensor, prediction: Prediction, draft_CD: Tensor) -> Tensor:
        """[C, V] the target's logits, or log-probabilities, at these flat positions.

        draft_CD: the drafter's own logits for the token that follows there, by the prediction's head.
        """
        ...


class FullDistribution:
    """The exact distribution: the target's head on its post-norm states."""

    def __init__(self, final_PH: Tensor, target: Target) -> None:
        self.final_PH, self.target = final_PH, target

    def logits(self, place_C: Tensor, prediction: Prediction, draft_CD: Tensor) -> Tensor:
        return self.target.head(self.final_PH[place_C])


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

    def logits(self, place_C: Tensor, prediction: Prediction, draft_CD: Tensor) -> Tensor:
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
