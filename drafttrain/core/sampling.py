"""A request's sampling settings, the next-token distribution that they make of logits, and keyed noise.

Shapes: B rows, V vocabulary, `...` any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

import torch
from torch import Tensor


class Lane(IntEnum):
    """Independent streams of noise. The drafter and the target need different ones, or sampling is no longer lossless."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3
    INPUT = 4  # random tokens that a drafter reads


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request chooses tokens. Raises ValueError for a setting out of range.

    The two tensors `temperature_B` and `seed_1` stay on the device, so that one captured graph serves other requests too.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: keep every token
    top_p: float = 1.0  # 1: keep every token
    seed: int = 0
    key_B: Tensor | None = None  # [B] int64, a number for each row's request, as a part of the noise's key
    min_p: float = 0.0  # 0: keep every token
    repetition_penalty: float = 1.0  # 1: change no logit
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the output has
    frequency_penalty: float = 0.0  # subtracted once for each time that the output has the token
    # by token, added to its logit before the penalties
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    draft_temperature: float | None = None  # temperature of the drafter's own samples; None: `temperature`
    shared_noise: bool = False  # drafters sample with the target's noise, for policies that compare choices
    temperature_B: Tensor | None = None  # [B] float32, replaces `temperature` where that is above 0
    seed_1: Tensor | None = None  # [1] int64, replaces `seed`

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
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def drops(self) -> bool:
        """Whether top-k, top-p or min-p may drop tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits are changed before they become a distribution."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)

    @property
    def drafting(self) -> Sampling:
        """The settings that drafters sample with."""
        if self.draft_temperature is None:
            return self
        return replace(self, temperature=self.draft_temperature, temperature_B=None)

    def rows(self, key_B: Tensor) -> Sampling:
        """The same settings for rows with these request keys."""
        return replace(self, key_B=key_B)

    def on_device(self, rows: int, device: torch.device) -> DeviceSampling:
        """These settings as tensors of `rows` entries: the B of the fields here, or B times N, a row's N nodes together."""
        temperature_M, seed_1 = self.temperature_B, self.seed_1
        if temperature_M is None:
            temperature_M = torch.full((rows,), self.temperature, device=device)
        if seed_1 is None:
            seed_1 = torch.full((1,), self.seed, dtype=torch.long, device=device)
        key_M = torch.zeros(rows, dtype=torch.long, device=device) if self.key_B is None else self.key_B.to(device)
        return DeviceSampling(per_node(temperature_M, rows), per_node(key_M, rows), seed_1)


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """The part of `Sampling` that the compiled operators read, as contiguous tensors."""

    temperature_M: Tensor  # float32
    key_M: Tensor  # int64
    seed_1: Tensor  # int64


def per_node(x_B: Tensor, rows: int) -> Tensor:
    """[rows]: each value repeated for the nodes of its row. Two values a, b for 6 rows give a a a b b b."""
    return x_B.contiguous() if len(x_B) == rows else x_B.repeat_interleave(rows // len(x_B))


def distribution(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] the next-token distribution of these logits after temperature, top-k, top-p and min-p, in this order.

    float64 stays float64, every other type becomes float32. Greedy gives a one-hot at the lowest index among ties.
    """
    if sampling.greedy:
        zeros_V = torch.zeros_like(logits_V, dtype=_wide(logits_V).dtype)
        return zeros_V.scatter_(-1, logits_V.argmax(-1, keepdim=True), 1.0)
    return _tempered(shaped(logits_V, sampling), sampling).softmax(-1)


def shaped(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] the logits, with minus infinity for tokens that top-k, top-p or min-p drop at the request's temperature.

    Top-p keeps the smallest set of most likely tokens whose mass reaches p. Min-p keeps tokens with at least min_p times
    the highest probability (arXiv 2407.01082). All do as transformers does, with one rule for equal logits: they stay or go
    together, also at the end of the set of top-p. So no order decides, and a token's fate depends on its logit alone. A row
    whose greatest logit is infinite has no probabilities, and stays as it is. It never syncs with the host. `ops.sampling` does
    the same on a GPU without sorting.
    """
    by_k = 0 < sampling.top_k < logits_V.shape[-1]
    if sampling.greedy or not (by_k or sampling.top_p < 1.0 or sampling.min_p > 0.0):
        return logits_V
    tempered_V = _tempered(logits_V, sampling)
    if by_k:
        best_k = tempered_V.topk(sampling.top_k, dim=-1).values
        tempered_V = _from(tempered_V, best_k[..., -1:], best_k[..., :1])
    if sampling.top_p < 1.0:
        sorted_V = tempered_V.sort(dim=-1, descending=True).values
        probability_V = sorted_V.softmax(-1)
        mass_before_V = probability_V.cumsum(-1) - probability_V
        lowest_1 = sorted_V.masked_fill(mass_before_V >= sampling.top_p, torch.inf).amin(-1, keepdim=True)
        tempered_V = _from(tempered_V, lowest_1, sorted_V[..., :1])
    if sampling.min_p > 0.0:
        greatest_1 = tempered_V.amax(-1, keepdim=True)
        tempered_V = _from(tempered_V, greatest_1 + math.log(sampling.min_p), greatest_1)
    return logits_V.masked_fill(tempered_V == -torch.inf, -torch.inf)


def _from(tempered_V: Tensor, lowest_1: Tensor, greatest_1: Tensor) -> Tensor:
    """The logits from the lowest on, minus infinity for the others; all of a row whose greatest one is infinite."""
    return tempered_V.masked_fill(tempered_V < lowest_1.masked_fill(greatest_1 == torch.inf, -torch.inf), -torch.inf)


def _wide(logits_V: Tensor) -> Tensor:
    return logits_V if logits_V.dtype == torch.float64 else logits_V.float()


def _tempered(logits_V: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature_B is None:
        return _wide(logits_V) / sampling.temperature
    leading_shape = logits_V.shape[:-1]
    return _wide(logits_V) / per_node(sampling.temperature_B, leading_shape.numel()).view(*leading_shape, 1)


def pick(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """[B] token ids sampled from each row's distribution by inverting its cumulative sum at a uniform number.

    A token of probability 0 is never picked.
    """
    cumulative_BV = p_BV.cumsum(-1)
    threshold_B1 = uniform_B.to(p_BV.dtype)[:, None] * cumulative_BV[:, -1:]
    index_B = (cumulative_BV <= threshold_B1).sum(-1)
    last_B = p_BV.shape[-1] - 1 - (p_BV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(index_B, last_B)


def choose(logits_BV: Tensor, sampling: Sampling, position_B: Tensor) -> Tensor:
    """[B] the next tokens that plain decoding chooses at these positions."""
    if sampling.greedy:
        return logits_BV.argmax(-1)
    return pick(distribution(logits_BV, sampling), uniform(sampling, position_B, Lane.TARGET))


def uniform(sampling: Sampling, position_B: Tensor, lane: Lane, draw: int = 0) -> Tensor:
    """[B] float64 in [0, 1), a pure function of (seed, request key, position, lane, draw).

    There may be fewer request keys than rows; `per_node` repeats them. The noise is keyed and not drawn in sequence, so that
    no number depends on the batch that a request is in. The generator is counter-based: SplitMix64 (Steele et al. 2014),
    applied to each part of the key in turn.
    """
    rows = len(position_B)
    key_B = torch.zeros_like(position_B) if sampling.key_B is None else per_node(sampling.key_B.to(position_B.device), rows)
    word_B = torch.full_like(position_B, sampling.seed) if sampling.seed_1 is None else sampling.seed_1.expand(rows)
    for key_part_B in (key_B, position_B, torch.full_like(position_B, int(lane) + 16 * draw)):
        word_B = _mix(word_B ^ _mix(key_part_B + _GOLDEN))
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
