"""Compares the states that a server gives with those of the trainer's own target.

Shapes: T tokens, K keys, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# of a state's difference, by the coarser dtype. 12 blocks on vLLM: 6e-7 in float32, 0.012 in bfloat16
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.06}
NEARER = 0.8  # another key's state is nearer where its difference is below this share of the own one's


@dataclass(frozen=True, slots=True)
class ReferenceStates:
    """The trainer's own states of one sequence, to compare a server's with."""

    ids: list[int]
    keys: tuple[int, ...]  # of the states that a server gives, in its order
    own: Mapping[int, Tensor]  # [T, H] in float32 by key: of `keys`, and of neighbouring blocks
    dtype: torch.dtype  # of the trainer's target

    @property
    def hidden_size(self) -> int:
        return next(iter(self.own.values())).shape[1]

    def fault(self, hidden_TKH: Tensor, label: Callable[[int], str]) -> str | None:
        """Why states of this sequence are not those of the target; None where they are. label: a state's name.

        In half precision rounding can be as large as the difference between two blocks' outputs. So a state must also be
        nearest to the own state of its key.
        """
        size, hidden_size = hidden_TKH.shape[2], self.hidden_size
        if size != hidden_size:
            return f"states of {size} values, the target's have {hidden_size}: it serves another model"
        tolerance = max(TOLERANCE.get(dtype, 0.06) for dtype in (hidden_TKH.dtype, self.dtype))
        for i, key in enumerate(self.keys):
            errors = {other_key: difference(hidden_TKH[:, i].float(), own_TH) for other_key, own_TH in self.own.items()}
            nearest = min(errors, key=errors.__getitem__)
            if errors[key] <= tolerance and errors[nearest] >= NEARER * errors[key]:
                continue
            hint = f"; it is {label(nearest)}" if errors[nearest] <= tolerance else ""
            return (
                f"{label(key)} differs from the target's by {errors[key]:.2g} of its norm, more than rounding does{hint}: "
                "it serves other layer ids, another model or another revision"
            )
        return None


def difference(found_TH: Tensor, own_TH: Tensor) -> float:
    """Median over positions of the difference's norm, as a share of the own state's."""
    return float(((found_TH - own_TH).norm(dim=-1) / own_TH.norm(dim=-1).clamp_min(1e-30)).median())
