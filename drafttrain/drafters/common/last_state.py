"""Drafters that read only the last accepted token and the target's state before it. They cache nothing.

Shapes: S slots, B rows, R slots to reset, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.model.drafter import Commit, RevertibleState
from drafttrain.model.target import FINAL
from drafttrain.ops.commit import keep_last


class LastState(RevertibleState):
    """Per slot: the target's post-norm state at the last committed position (hidden_SH), and the root token (root_S).

    For drafters with `taps = Taps(final=True)`.
    """

    def __init__(self, slots: int, width: int, like: Tensor) -> None:
        """width: of the target's states. like: a weight of the drafter; states have its dtype and device."""
        self.hidden_SH = like.new_zeros(slots, width)
        self.root_S = torch.zeros(slots, dtype=torch.long, device=like.device)

    def reset(self, slot_R: Tensor) -> None:
        self.hidden_SH.index_fill_(0, slot_R, 0.0)
        self.root_S.index_fill_(0, slot_R, 0)

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        keep_last(self.hidden_SH, self.root_S, commit.hidden[FINAL], commit.next_BA, commit.count_B, slot_B)

    def snapshot(self, slot_B: Tensor) -> tuple[Tensor, Tensor]:
        return self.hidden_SH[slot_B], self.root_S[slot_B]

    def restore(self, slot_B: Tensor, snapshot: tuple[Tensor, Tensor]) -> None:
        self.hidden_SH[slot_B], self.root_S[slot_B] = snapshot
