"""The options of dspark."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class DSparkOptions(BlockOptions):
    family: str = "dspark"
    block_size: int = 7
    slots: str = "shifted"
    rank: int = 256  # of the bias that the token before gives
    gaps: str = "stop"  # stop: a block ends before its first unsupervised token. skip: later labels count, as in speculators


OPTIONS = DSparkOptions
