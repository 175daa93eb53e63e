"""Target states computed as they are needed, batch by batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import Taps, Target


class Online:
    """Runs the frozen target over a batch and returns the batch, on the target's device, with the tapped states."""

    def __init__(self, target: Target, taps: Taps) -> None:
        self.target, self.taps = target, taps

    @torch.no_grad()
    def fill(self, batch: TrainBatch) -> TrainBatch:
        """The objective needs the post-norm output beside the drafter's own taps: it is the target's law before the head."""
        batch = batch.to(self.target.device)
        no_rows_B0 = batch.token_BT[:, :0]
        out = self.target(batch.token_BT, None, batch.sees(), batch.position_BT, self.taps | Taps(final=True), no_rows_B0)
        return replace(batch, hidden=out.hidden)
