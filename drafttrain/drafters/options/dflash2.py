"""The options of dflash2."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class DFlash2Options(BlockOptions):
    family: str = "dflash2"
    causal_windows: bool = False
    group: int = 16  # channels that share what a position adds to the kernel of a convolution
    rank: int = 256  # of the selector
    candidates: int = 16  # tokens of a slot that it chooses from


OPTIONS = DFlash2Options
