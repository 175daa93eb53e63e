"""The options of dflash."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class DFlashOptions(BlockOptions):
    family: str = "dflash"


OPTIONS = DFlashOptions
