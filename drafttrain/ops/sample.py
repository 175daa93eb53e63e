"""Sample tokens from logits, with keyed noise.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.core.sampling import Lane, Sampling, distribution, pick, uniform
from drafttrain.ops import library
from drafttrain.ops.shaped import shaped
from drafttrain.ops.top import top


def sample(logits_MV: Tensor, sampling: Sampling, position_M: Tensor, lane: Lane, draw: int = 0) -> Tensor:
    """[M] token ids sampled from each row's distribution, with the noise of (seed, key, position, lane, draw).

    Greedy: the most likely tokens. The sampling has one key and temperature for each row, or one for each N rows.
    """
    if sampling.greedy:  # torch's argmax on a GPU does not define ties
        return top(logits_MV, 1)[1][:, 0] if logits_MV.is_cuda else logits_MV.argmax(-1)
    if not library.serves(logits_MV):
        return reference(logits_MV, sampling, position_M, lane, draw)
    params, position_M = sampling.on_device(len(logits_MV), logits_MV.device), position_M.contiguous()
    token_M = torch.empty_like(position_M)
    shaped_MV = shaped(logits_MV, sampling).contiguous()
    torch.ops.drafttrain.sample(
        shaped_MV, params.temperature_M, params.key_M, position_M, params.seed_1, int(lane), draw, token_M
    )
    return token_M


def reference(logits_MV: Tensor, sampling: Sampling, position_M: Tensor, lane: Lane, draw: int = 0) -> Tensor:
    """The plain-torch twin of `sample`."""
    return pick(distribution(logits_MV, sampling), uniform(sampling, position_M, lane, draw))
