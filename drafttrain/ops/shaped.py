"""Top-k, top-p and min-p of rows of logits, on a GPU by one kernel that sorts nothing.

Shapes: B rows or rows of nodes, V vocabulary, `...` any leading dimensions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from drafttrain.core import sampling as core
from drafttrain.core.sampling import Sampling
from drafttrain.core.sampling import shaped as reference
from drafttrain.ops import library


def shaped(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] as its plain-torch twin, `core.sampling.shaped`. The sums of probability round differently: a token whose
    cumulative probability is within 1e-6 or so of p may stay in one and go in the other.
    """
    if sampling.greedy or not sampling.drops or not (logits_V.is_cuda and library.serves(logits_V)):
        return reference(logits_V, sampling)
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
