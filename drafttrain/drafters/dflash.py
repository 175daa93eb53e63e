"""DFlash: a block of drafts in one pass, from masks after the root and the target's fused states (arXiv 2602.06036).

Shapes: B rows, K drafts, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import BlockDrafter, Choices
from drafttrain.drafters.common.block_options import BlockOptions


@dataclass
class DFlashOptions(BlockOptions):
    family: str = "dflash"


class DFlash(BlockDrafter):
    """Drafts are deterministic at any temperature, since slots do not know each other's tokens: a chain of argmaxes, or a tree
    of their likeliest tokens."""

    def choices(self, state_BKH: Tensor) -> Choices:
        logits_BKV = self.slot_logits(state_BKH)
        return lambda draft, before_BW: logits_BKV[:, draft, None]


FAMILY = Family("dflash", DFlashOptions, DFlash)
