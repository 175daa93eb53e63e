"""JetSpec: DFlash whose slots see no later slot of their block, drafted as a best-first tree (arXiv 2606.18394).

All slots count alike in the loss, the divergence from the target's distribution, so that a slot's other choices are worth
verifying too.
"""

from __future__ import annotations

from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import BlockDrafter
from drafttrain.drafters.options import JetSpecOptions


class JetSpec(BlockDrafter):
    """Drafts do not know each other's tokens, so a tree has one choice of tokens per depth."""


FAMILY = Family("jetspec", JetSpecOptions, JetSpec)
