"""How a token is chosen: the request's settings, the law they make of logits, and keyed noise.

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
    temperature_B [B] float32, seed_1 [1] int64: read in place of `temperature` (where that is above 0) and `seed`, from the
    device, so that a captured graph serves other requests too.
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
    temperature_B: Tensor | None = None
    seed_1: Tensor | None = None

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
        if self.draft_temperature is None:
            return self
        return replace(self, temperature=self.draft_temperature, temperature_B=None)

    def rows(self, key_B: Tensor) -> Sampling:
        return replace(self, key_B=key_B)

    def on_device(self, rows: int, device: torch.device) -> DeviceSampling:
        """For so many rows: as many as the fields here have, or N times as many, each one's N nodes together."""
        temperature_M, seed_1 = self.temperature_B, self.seed_1
        if temperature_M is None:
            temperature_M = torch.full((rows,), self.temperature, device=device)
        if seed_1 is None:
            seed_1 = torch.full((1,), self.seed, dtype=torch.long, device=device)
        key_M = torch.zeros(rows, dtype=torch.long, device=device) if self.key_B is None else self.key_B.to(device)
        return DeviceSampling(per_node(temperature_M, rows), per_node(key_M, rows), seed_1)


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """What the compiled operators read of `Sampling`: contiguous, [M] float32, [M] int64, [1] int64."""

    temperature_M: Tensor
    key_M: Tensor
    seed_1: Tensor


def per_node(x_B: Tensor, rows: int) -> Tensor:
    """[rows]: each of the values repeated for the nodes of its row. With 2 values and 6 rows: a a a b b b."""
    return x_B.contiguous() if len(x_B) == rows else x_B.repeat_interleave(rows // len(x_B))


def distribution(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] logits -> the probabilities the request samples from: temperature, top-k, top-p, min-p, in this order.

    float64 stays float64, everything else becomes float32. Greedy gives a one-hot at the lowest index among ties.
    """
    if sampling.greedy:
        like_V = torch.zeros_like(logits_V, dtype=_wide(logits_V).dtype)
        return like_V.scatter_(-1, logits_V.argmax(-1, keepdim=True), 1.0)
    return _tempered(shaped(logits_V, sampling), sampling).softmax(-1)


def shaped(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] the logits with minus infinity for what top-k, top-p and min-p drop, at the request's temperature.

    Top-p keeps the smallest set of most likely tokens whose mass reaches p, min-p those of at least
    so many times the most likely one's probability (arXiv 2407.01082); both as transformers does. Never asks the device.
    """
    by_k = 0 < sampling.top_k < logits_V.shape[-1]
    if sampling.greedy or not (by_k or sampling.top_p < 1.0 or sampling.min_p > 0.0):
        return logits_V
    tempered_V = _tempered(logits_V, sampling)
    if by_k:
        floor_1 = tempered_V.topk(sampling.top_k, dim=-1).values[..., -1:]
        tempered_V = tempered_V.masked_fill(tempered_V < floor_1, -torch.inf)
    if sampling.top_p < 1.0:
        sorted_V, order_V = tempered_V.sort(dim=-1, descending=True)
        probability_V = sorted_V.softmax(-1)
        before_V = probability_V.cumsum(-1) - probability_V
        drop_V = torch.zeros_like(before_V, dtype=torch.bool).scatter_(-1, order_V, before_V >= sampling.top_p)
        tempered_V = tempered_V.masked_fill(drop_V, -torch.inf)
    if sampling.min_p > 0.0:
        law_V = tempered_V.softmax(-1)
        tempered_V = tempered_V.masked_fill(law_V < sampling.min_p * law_V.amax(-1, keepdim=True), -torch.inf)
    return logits_V.masked_fill(tempered_V == -torch.inf, -torch.inf)


def _wide(logits_V: Tensor) -> Tensor:
    return logits_V if logits_V.dtype == torch.float64 else logits_V.float()


def _tempered(logits_V: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature_B is None:
        return _wide(logits_V) / sampling.temperature
    lead = logits_V.shape[:-1]
    return _wide(logits_V) / per_node(sampling.temperature_B, lead.numel()).view(*lead, 1)


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
    return pick(distribution(logits_BV, sampling), uniform(sampling, position_B, Lane.TARGET))


def uniform(sampling: Sampling, position_B: Tensor, lane: Lane, draw: int = 0) -> Tensor:
    """[B] float64 in [0, 1), a pure function of (seed, request, position, lane, draw). Keys may be fewer: see `per_node`.

    Keyed rather than drawn in sequence, so that no number depends on the batch a request happens to sit in.
    A counter-based generator: SplitMix64 (Steele et al. 2014) applied to each part of the key in turn.
    """
    rows = len(position_B)
    key_B = torch.zeros_like(position_B) if sampling.key_B is None else per_node(sampling.key_B.to(position_B.device), rows)
    word_B = torch.full_like(position_B, sampling.seed) if sampling.seed_1 is None else sampling.seed_1.expand(rows)
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
