"""The options of dfly."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class DFlyOptions(BlockOptions):
    family: str = "dfly"
    block_size: int = 8
    hidden_correction_size: int | None = None  # inner width of the correction by the token before; None: the hidden size


OPTIONS = DFlyOptions
