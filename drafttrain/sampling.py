"""Floor 0: how a token is chosen: the request's settings, the law they make of logits, and keyed noise.

Shapes: B rows, V vocabulary, `...` any leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor


class Lane(IntEnum):
    """Independent streams of noise. The drafter's must differ from the verifier's, or losslessness is lost."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token, repetition_penalty 1 changes no logit.

    draft_temperature: what drafters draw their own samples at; None: `temperature`. shared_noise: they draw with the
    verifier's numbers, for policies that compare choices. key_B names each row's request for the noise.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    key_B: Tensor | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    draft_temperature: float | None = None
    shared_noise: bool = False

    def __post_init__(self) -> None:
        if self.temperature < 0.0:
            raise ValueError(f"temperature is {self.temperature}; set it to 0 (greedy) or above")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; set it to 0 (off) or above")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; set it above 0 and at most 1")
        if not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"min_p is {self.min_p}; set it to 0 (off) or above, and below 1")
        if self.repetition_penalty <= 0.0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; set it above 0, 1 is off")
        if self.draft_temperature is not None and self.draft_temperature < 0.0:
            raise ValueError(f"draft_temperature is {self.draft_temperature}; set it to 0 (greedy) or above")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def drafting(self) -> Sampling:
        """The settings that drafters sample with."""
        return self if self.draft_temperature is None else replace(self, temperature=self.draft_temperature)

    def rows(self, key_B: Tensor) -> Sampling:
        return replace(self, key_B=key_B)


def law(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] logits -> the probabilities the request samples from: temperature, top-k, top-p, min-p, in this order.

    float64 stays float64, everything else becomes float32. Greedy gives a one-hot at the lowest index among ties.
    Top-p keeps the smallest set of most likely tokens whose mass reaches p, min-p those of at least
    so many times the most likely one's probability (arXiv 2407.01082); both as transformers does.
    """
    logits_V = logits_V if logits_V.dtype == torch.float64 else logits_V.float()
    if sampling.greedy:
        return torch.zeros_like(logits_V).scatter_(-1, logits_V.argmax(-1, keepdim=True), 1.0)
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < logits_V.shape[-1]:
        floor_1 = logits_V.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits_V = logits_V.masked_fill(logits_V < floor_1, -torch.inf)
    if sampling.top_p < 1.0:
        sorted_V, order_V = logits_V.sort(dim=-1, descending=True)
        probability_V = sorted_V.softmax(-1)
        before_V = probability_V.cumsum(-1) - probability_V
        drop_V = torch.zeros_like(before_V, dtype=torch.bool).scatter_(-1, order_V, before_V >= sampling.top_p)
        logits_V = logits_V.masked_fill(drop_V, -torch.inf)
    law_V = logits_V.softmax(-1)
    if sampling.min_p > 0.0:
        law_V = law_V.masked_fill(law_V < sampling.min_p * law_V.amax(-1, keepdim=True), 0.0)
        law_V = law_V / law_V.sum(-1, keepdim=True)
    return law_V


def pick(law_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """[B] token ids: the inverse of each law's cumulative sum at a uniform number. A zero-probability token never comes."""
    cumulative_BV = law_BV.cumsum(-1)
    threshold_B1 = uniform_B.to(law_BV.dtype)[:, None] * cumulative_BV[:, -1:]
    index_B = (cumulative_BV <= threshold_B1).sum(-1)
    last_B = law_BV.shape[-1] - 1 - (law_BV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(index_B, last_B)


def choose(logits_BV: Tensor, sampling: Sampling, position_B: Tensor) -> Tensor:
    """[B] the next token of plain decoding at these positions."""
    if sampling.greedy:
        return logits_BV.argmax(-1)
    return pick(law(logits_BV, sampling), uniform(sampling, position_B, Lane.TARGET))


def uniform(sampling: Sampling, position_B: Tensor, lane: Lane, draw: int = 0) -> Tensor:
    """[B] float64 in [0, 1), a pure function of (seed, request, position, lane, draw).

    Keyed rather than drawn in sequence, so that no number depends on the batch a request happens to sit in.
    A counter-based generator: SplitMix64 (Steele et al. 2014) applied to each part of the key in turn.
    """
    key_B = torch.zeros_like(position_B) if sampling.key_B is None else sampling.key_B.to(position_B.device)
    word_B = torch.full_like(position_B, sampling.seed)
    for part in (key_B, position_B, torch.full_like(position_B, int(lane) + 16 * draw)):
        word_B = _mix(word_B ^ _mix(part + _GOLDEN))
    return _shift(word_B, 11).to(torch.float64) * 2.0**-53


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift(word_B: Tensor, bits: int) -> Tensor:
    return (word_B >> bits) & ((1 << (64 - bits)) - 1)


def _mix(word_B: Tensor) -> Tensor:
    word_B = word_B + _GOLDEN
    word_B = (word_B ^ _shift(word_B, 30)) * _FIRST
    word_B = (word_B ^ _shift(word_B, 27)) * _SECOND
    return word_B ^ _shift(word_B, 31)
