"""The options of dspark."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class DSparkOptions(BlockOptions):
    family: str = "dspark"
    draft_vocab: int | None = None  # so many of the target's tokens, the commonest in the training data, with a head of its own
    block_size: int = 7
    slots: str = "shifted"
    rank: int = 256  # of the bias that the token before gives
    gaps: str = "stop"  # stop: a block ends before its first unsupervised token. skip: later labels count, as in speculators


OPTIONS = DSparkOptions
