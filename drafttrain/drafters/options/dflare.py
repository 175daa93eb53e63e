"""The options of dflare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class DFlareOptions(BlockOptions):
    TAPS: ClassVar[int] = 9

    family: str = "dflare"
    layers: int = 7
    taps: list[int] | None = None  # block outputs, from 0; None: nine, evenly from 1 to n - 3


OPTIONS = DFlareOptions
