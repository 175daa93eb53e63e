"""The options of xpress."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class XPressOptions(BlockOptions):
    family: str = "xpress"
    gamma: float | None = 4.0
    rank: int = 256  # width of the refiner
    mlp_hidden: int | None = None  # inner width of the refiner's MLP; None: twice the rank
    free_passes: int = 3  # passes of a training step in which the refiner reads its own drafts
    free_weight: float = 0.3  # of the loss of all of these passes together
    base_weight: float = 0.6  # of the loss of the slots' own logits


OPTIONS = XPressOptions
