"""Computes target states in every step, batch by batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import Taps, Target


class Online:
    """Runs the frozen target over a batch."""

    def __init__(self, target: Target, taps: Taps) -> None:
        self.target, self.taps = target, taps

    @torch.no_grad()
    def fill(self, batch: TrainBatch) -> TrainBatch:
        """The batch on the target's device with the tapped states and the post-norm state.

        The objective needs the post-norm state in addition to the drafter's taps: the head turns it into the target's
        distribution.
        """
        batch = batch.to(self.target.device)
        no_rows_B0 = batch.token_BT[:, :0]
        out = self.target(batch.token_BT, None, batch.sees(), batch.position_BT, self.taps | Taps(final=True), no_rows_B0)
        return replace(batch, hidden=out.hidden)
