"""DSpark: a block in one pass, then drafts one after the other with a bias from the token before (arXiv 2607.05147).

Shapes: B rows, W nodes of a depth, K drafts, M predictions, H hidden, R rank, V vocabulary.

Slots are shifted: slot k has the position of the token before its own, the root for k = 0. With the slot's state h_k:

    logits_k     = target's head(h_k) + W2 W1[token before]
    confidence_k = sigmoid(linear([h_k; W1[token before]]))        P(draft k is accepted, if those above it are)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import BlockDrafter, Choices
from drafttrain.drafters.common.calibration import PlattCalibration
from drafttrain.drafters.options import DSparkOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.layers import Linear
from drafttrain.model.target import Target

STD = 0.01  # of W1 at the start


class MarkovHead(nn.Module):
    """markov_w1 and markov_w2 are named as in the official code."""

    def __init__(self, vocab: int, rank: int, drafted: int) -> None:
        """drafted: tokens that are given a bias."""
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), Linear(rank, drafted, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=STD)


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, input_X: Tensor) -> Tensor:
        logit: Tensor = self.proj(input_X)[..., 0]
        return logit


class DSpark(BlockDrafter):
    calibration: PlattCalibration

    def __init__(self, options: DSparkOptions, target: Target) -> None:
        super().__init__(options, target, walks=True, draft_vocab=options.draft_vocab)
        width = target.shape.hidden_size
        self.width, self.unbroken = width, options.gaps == "stop"
        self.markov_head = MarkovHead(target.shape.vocab_size, options.rank, options.draft_vocab or target.shape.vocab_size)
        self.confidence_head = ConfidenceHead(width + options.rank)
        if options.confidence is not None:
            raise UserError(
                f"drafter.confidence is {options.confidence!r}, but this family has a confidence head; set it to null"
            )
        self.calibration = PlattCalibration(self.draft_length)

    def head_input(self, state_H: Tensor, before: Tensor) -> Tensor:
        return torch.cat([state_H, self.markov_head.markov_w1(before).to(state_H.dtype)], -1)

    def head(self, input_X: Tensor) -> Tensor:
        logits_V = self.slot_logits(input_X[..., : self.width])
        return logits_V + self.markov_head.markov_w2(input_X[..., self.width :]).to(logits_V.dtype)

    def choices(self, state_BKH: Tensor) -> Choices:
        logits_BKV, head = self.slot_logits(state_BKH), self.markov_head

        def choose(draft: int, before_BW: Tensor) -> Tensor:
            return logits_BKV[:, draft, None] + head.markov_w2(head.markov_w1(before_BW)).to(logits_BKV.dtype)

        return choose

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        for prediction in super().predict(batch):
            yield replace(prediction, confidence=self.confidence_head)

    def with_confidence(self, chain: DraftTree, state_BKH: Tensor, logits: Iterable[Tensor]) -> DraftTree:
        return self.calibrated(chain, self.confidence_head(self.head_input(state_BKH, chain.token_BN[:, :-1])))


FAMILY = Family("dspark", DSparkOptions, DSpark, early=1)
