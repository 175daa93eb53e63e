"""The options of domino."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class DominoOptions(BlockOptions):
    family: str = "domino"
    state: int = 1024  # units of the recurrent state over the tokens above a draft
    rank: int = 256  # of the correction that it gives
    base_share: float = 1.0  # of the loss on slots alone at the start; it falls to 0
    base_until: float = 1.0  # share of the training steps after which it is 0


OPTIONS = DominoOptions
