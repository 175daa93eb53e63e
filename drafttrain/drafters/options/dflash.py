"""The options of dflash."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class DFlashOptions(BlockOptions):
    family: str = "dflash"
    draft_vocab: int | None = None  # so many of the target's tokens, the commonest in the training data, with a head of its own


OPTIONS = DFlashOptions
