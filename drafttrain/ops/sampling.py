"""Sampling from logits: top-k, top-p and min-p, on a GPU by one kernel that sorts nothing, and tokens drawn with keyed noise.

Shapes: B rows or rows of nodes, M rows, V vocabulary, `...` any leading dimensions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from drafttrain.core import sampling as core
from drafttrain.core.sampling import Lane, Sampling, pick, uniform
from drafttrain.core.sampling import shaped as shaped_reference
from drafttrain.ops import library
from drafttrain.ops.top import top


def shaped(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] as its plain-torch twin, `core.sampling.shaped`. The sums of probability round differently: a token whose
    cumulative probability is within 1e-6 or so of p may stay in one and go in the other.
    """
    if sampling.greedy or not sampling.drops or not (logits_V.is_cuda and library.serves(logits_V)):
        return shaped_reference(logits_V, sampling)
    return _compiled(logits_V, sampling)


def distribution(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] as `core.sampling.distribution`, of the tokens that `shaped` keeps."""
    return core.distribution(shaped(logits_V, sampling), replace(sampling, top_k=0, top_p=1.0, min_p=0.0))


def _compiled(logits_V: Tensor, sampling: Sampling) -> Tensor:
    logits_BV, temperature_B = logits_V.reshape(-1, logits_V.shape[-1]).contiguous(), sampling.temperature_B
    if temperature_B is None:
        temperature_B = torch.full((1,), sampling.temperature, device=logits_V.device)
    out_BV = torch.empty_like(logits_BV)
    max_gap = -math.log(sampling.min_p) if sampling.min_p > 0.0 else math.inf
    torch.ops.drafttrain.shaped(logits_BV, temperature_B.contiguous(), sampling.top_k, sampling.top_p, max_gap, out_BV)
    return out_BV.view(logits_V.shape)


def sample(logits_MV: Tensor, sampling: Sampling, position_M: Tensor, lane: Lane, draw: int = 0) -> Tensor:
    """[M] token ids sampled from each row's distribution, with the noise of (seed, key, position, lane, draw).

    Greedy: the most likely tokens. The sampling has one key and temperature for each row, or one for each N rows.
    """
    if sampling.greedy:  # torch's argmax on a GPU does not define ties
        return top(logits_MV, 1)[1][:, 0] if logits_MV.is_cuda else logits_MV.argmax(-1)
    if not library.serves(logits_MV):
        return sample_reference(logits_MV, sampling, position_M, lane, draw)
    params, position_M = sampling.on_device(len(logits_MV), logits_MV.device), position_M.contiguous()
    token_M = torch.empty_like(position_M)
    shaped_MV = shaped(logits_MV, sampling).contiguous()
    torch.ops.drafttrain.sample(
        shaped_MV, params.temperature_M, params.key_M, position_M, params.seed_1, int(lane), draw, token_M
    )
    return token_M


def sample_reference(logits_MV: Tensor, sampling: Sampling, position_M: Tensor, lane: Lane, draw: int = 0) -> Tensor:
    """The plain-torch twin of `sample`."""
    return pick(core.distribution(logits_MV, sampling), uniform(sampling, position_M, lane, draw))
