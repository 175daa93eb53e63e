"""DFlash: a block of drafts in one pass, from masks after the root and the target's fused states (arXiv 2602.06036).

Shapes: B rows, K drafts, H hidden.
"""

from __future__ import annotations

from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import BlockDrafter
from drafttrain.drafters.options import DFlashOptions
from drafttrain.model.target import Target


class DFlash(BlockDrafter):
    """Drafts are deterministic at any temperature, since slots do not know each other's tokens: a chain of argmaxes, or a tree
    of their likeliest tokens."""

    def __init__(self, options: DFlashOptions, target: Target) -> None:
        super().__init__(options, target, draft_vocab=options.draft_vocab)
        self.visible = options.visible()


FAMILY = Family("dflash", DFlashOptions, DFlash, early=2)
