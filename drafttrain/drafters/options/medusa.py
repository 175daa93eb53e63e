"""The options of medusa."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.drafters.common.options import TreeOptions
from drafttrain.model.lora import LoraSpec


@dataclass
class MedusaOptions(TreeOptions):
    """K residual heads, how they start, and the tree that their choices make."""

    family: str = "medusa"
    heads: int = 4
    layers: int = 1  # residual blocks per head
    init: str = "copy"  # copy: own output matrices, from the target's. share: the target's own, frozen
    head_decay: float = 0.8  # head k (from 1) weighs head_decay ** k in the loss
    adapter: LoraSpec = field(default_factory=lambda: LoraSpec(rank=0))  # Medusa-2, from rank 1: the target is trained too


OPTIONS = MedusaOptions
