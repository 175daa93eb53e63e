"""Two texts in a narrow format part at one token: does rounding explain it, as large as it shows itself to be?

`measure.exactness` allows for the rounding of the last logits alone, which suits trained models. Rounding in all blocks before
moves a random model's logits several times further, by any forward. So the bar is measured: transformers' own error at that
position, against the same weights in float32. And ours may not be much larger, or it is no rounding.
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

WORSE = 2.0  # our error may be so many times transformers'


@lru_cache(maxsize=1)
def exact_copy(model: Any) -> Any:
    return copy.deepcopy(model).float()


@torch.no_grad()
def explains(target: HFTarget, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether both tokens where the texts part are as likely as can be told, and our logits no worse than transformers'."""
    at = first_difference(ours, theirs)
    if at is None or at >= min(len(ours), len(theirs)):
        return at is None
    token_1T = torch.tensor([[*prompt, *ours[:at]]], device=target.device)
    true_V, their_V = (m(token_1T).logits[0, -1].double() for m in (exact_copy(target.model), target.model))
    our_error, their_error = own_logits(target, token_1T) - true_V, their_V - true_V
    gap = true_V.max() - true_V[[ours[at], theirs[at]]].min()
    return bool(gap <= 2 * their_error.abs().max()) and bool(our_error.norm() <= WORSE * their_error.norm())


def own_logits(target: HFTarget, token_1T: Tensor) -> Tensor:
    """[V] after the last token, by the target's own forward, the last positions as they are decoded: from the cache."""
    length = token_1T.shape[1]
    kv, position_1T = target.new_cache(1, length + 1), torch.arange(length, device=token_1T.device)[None]
    none_10, last_11 = position_1T[:, :0], torch.zeros_like(position_1T[:, :1])
    if length > 1:
        target(token_1T[:, :-1], kv, None, position_1T[:, :-1], Taps(), none_10)
        kv.keep(position_1T[:, :-1], torch.full((1,), length - 1, device=token_1T.device))
    out = target(token_1T[:, -1:], kv, None, position_1T[:, -1:], Taps(), last_11)
    assert out.logits_BRV is not None
    return out.logits_BRV[0, 0].double()
