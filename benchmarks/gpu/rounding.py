"""Two texts in a narrow format differ from one token on: does rounding, as measured, explain it?

`measure.exactness` allows only for the rounding of the last logits, which suits trained models. In a random model, rounding in
the earlier blocks moves the logits several times further. So the bound is measured: transformers' own error at that position,
compared with the same weights in float32. Our error may not be much larger.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from drafttrain.measure.exactness import first_difference
from drafttrain.model.target import Taps
from drafttrain.targets.hf import HFTarget

WORSE = 2.0  # our error may be this many times transformers'


@lru_cache(maxsize=1)
def exact_copy(model: Any) -> Any:
    return copy.deepcopy(model).float()


@torch.no_grad()
def explains(target: HFTarget, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether both tokens are equally likely within the error, and our logits are no worse than transformers'."""
    at = first_difference(ours, theirs)
    if at is None or at >= min(len(ours), len(theirs)):
        return at is None
    token_1T = torch.tensor([[*prompt, *ours[:at]]], device=target.device)
    true_V, their_V = (m(token_1T).logits[0, -1].double() for m in (exact_copy(target.model), target.model))
    our_error, their_error = own_logits(target, token_1T) - true_V, their_V - true_V
    gap = true_V.max() - true_V[[ours[at], theirs[at]]].min()
    return bool(gap <= 2 * their_error.abs().max()) and bool(our_error.norm() <= WORSE * their_error.norm())


def own_logits(target: HFTarget, token_1T: Tensor) -> Tensor:
    """[V] after the last token, by the target's own forward, with the last positions decoded from the cache."""
    length = token_1T.shape[1]
    kv, position_1T = target.new_cache(1, length + 1), torch.arange(length, device=token_1T.device)[None]
    none_10, last_11 = position_1T[:, :0], torch.zeros_like(position_1T[:, :1])
    if length > 1:
        target(token_1T[:, :-1], kv, None, position_1T[:, :-1], Taps(), none_10)
        kv.keep(position_1T[:, :-1], torch.full((1,), length - 1, device=token_1T.device))
    out = target(token_1T[:, -1:], kv, None, position_1T[:, -1:], Taps(), last_11)
    assert out.logits_BRV is not None
    return out.logits_BRV[0, 0].double()
