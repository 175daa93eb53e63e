"""Drafters that propose from the end of the text alone: the target's last state and the root. They cache nothing.

Shapes: S slots, B rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.target import FINAL


@dataclass
class Tip:
    """The target's post-norm state at the last committed position, and the root token, per slot."""

    hidden_SH: Tensor
    root_S: Tensor


def blank(slots: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """What a tip holds before any text, in the dtype and on the device of `like`."""
    return like.new_zeros(slots, width), torch.zeros(slots, dtype=torch.long, device=like.device)


class TipDrafter(Drafter):
    """Its state is a `Tip`, and whatever else does not change from round to round."""

    def reset(self, state: Tip, slot_R: Tensor) -> None:
        state.hidden_SH[slot_R], state.root_S[slot_R] = 0.0, 0

    def observe(self, state: Tip, commit: Commit, slot_B: Tensor) -> None:
        last_B1, new_B1 = (commit.count_B - 1).clamp_min(0)[:, None], (commit.count_B > 0)[:, None]
        final_BAH, held_BH = commit.hidden[FINAL], state.hidden_SH[slot_B]  # held: of rows without a new position
        last_BH = final_BAH.gather(1, last_B1[..., None].expand(-1, -1, final_BAH.shape[-1]))[:, 0]
        state.hidden_SH[slot_B] = torch.where(new_B1, last_BH.to(held_BH.dtype), held_BH)
        state.root_S[slot_B] = torch.where(new_B1, commit.next_BA.gather(1, last_B1), state.root_S[slot_B][:, None])[:, 0]

    def mark(self, state: Tip, slot_B: Tensor) -> tuple[Tensor, Tensor]:
        return state.hidden_SH[slot_B], state.root_S[slot_B]

    def rewind(self, state: Tip, slot_B: Tensor, mark: tuple[Tensor, Tensor]) -> None:
        state.hidden_SH[slot_B], state.root_S[slot_B] = mark
