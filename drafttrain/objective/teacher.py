"""The target's law at chosen positions, from its post-norm states or from its k likeliest tokens.

Shapes: P = B * T positions, C a chunk of them, H hidden, V vocabulary, D the drafter's own part of it, k kept tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from drafttrain.model.batch import Prediction, Top, TrainBatch
from drafttrain.model.target import FINAL, Target


class Law(Protocol):
    """What the objective asks for, chunk by chunk: no [P, V] tensor is ever whole."""

    def logits(self, place_C: Tensor, prediction: Prediction, draft_CD: Tensor) -> Tensor:
        """[C, V] the target's logits, or log-probabilities, at these flat positions.

        draft_CD: the drafter's own logits for the token that follows there, by the prediction's head.
        """
        ...


class WholeLaw:
    """The target's head on its post-norm states."""

    def __init__(self, final_PH: Tensor, target: Target) -> None:
        self.final_PH, self.target = final_PH, target

    def logits(self, place_C: Tensor, prediction: Prediction, draft_CD: Tensor) -> Tensor:
        return self.target.head(self.final_PH[place_C])


class TopLaw:
    """The k likeliest tokens as they were, and the mass of all others, which lies among these as the drafter's own does.

    Of all laws that agree with what is kept, this one is the nearest to the drafter's q. A divergence from it is the one
    between p and q with the others taken for one outcome, the ghost token of arXiv 2503.16870: never above the true
    divergence, and its gradient with the law held fixed is the whole one, since the tail is at its minimum. sum min(p, q) is
    never below the true acceptance, and above it by no more than the mass of the others.
    """

    def __init__(self, top: Top, vocab: int) -> None:
        self.id_Pk, self.log_p_Pk = top.id_BTk.flatten(0, 1), top.log_p_BTk.flatten(0, 1)
        self.vocab, self.log_rest_P = vocab, top.log_rest_BT.flatten()

    def logits(self, place_C: Tensor, prediction: Prediction, draft_CD: Tensor) -> Tensor:
        id_Ck = self.id_Pk[place_C]
        tail_CV = prediction.whole(draft_CD, self.vocab).float().scatter(1, id_Ck, -torch.inf)
        none_C1 = (
            tail_CV.amax(-1, keepdim=True) == -torch.inf
        )  # the drafter knows no other token: they are as likely as each other
        tail_CV = torch.where(none_C1, torch.zeros_like(tail_CV).scatter_(1, id_Ck, -torch.inf), tail_CV)
        tail_CV = tail_CV.log_softmax(-1) + self.log_rest_P[place_C, None]
        return tail_CV.scatter_(1, id_Ck, self.log_p_Pk[place_C])


def law_of(batch: TrainBatch, target: Target) -> Law:
    """The batch's law in whichever way it has it."""
    if batch.top is not None:
        return TopLaw(batch.top, target.shape.vocab_size)
    return WholeLaw(batch.hidden[FINAL].flatten(0, 1), target)
