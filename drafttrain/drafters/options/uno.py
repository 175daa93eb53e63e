"""The options of uno."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.drafters.common.options import TreeOptions


@dataclass
class UnoOptions(TreeOptions):
    """The target's LoRA, the drafting pass, and the shares of anchors in training."""

    family: str = "uno"
    tree: str = "chain"
    width: int = 4
    draft_length: int = 4  # K: the root and K - 1 random tokens in a drafting pass, K drafts
    lora_rank: int = 16
    lora_alpha: float = 32.0  # the matrices' product counts alpha / rank
    lora_targets: list[str] = field(default_factory=list)  # last names of linear maps, such as q_proj; none: all in the blocks
    retention: float = 0.7  # in training a share retention ** d of the anchors has d random tokens
    least_retention: float = 0.2  # and no less than this


OPTIONS = UnoOptions
