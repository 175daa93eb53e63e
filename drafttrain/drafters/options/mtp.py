"""The options of mtp."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.drafters.common.options import TreeOptions
from drafttrain.model.shapes import LayerOptions


@dataclass
class MTPOptions(TreeOptions):
    """How deep the module is trained on its own outputs, and what its block is like."""

    family: str = "mtp"
    tree: str = "chain"
    steps: int = 3  # of training on own outputs
    step_decay: float = 0.8  # step i (from 0) weighs step_decay ** i in the loss
    draft_length: int = 4
    norm_output: bool = False  # the normed state goes to the next depth; DeepSeek's is not normed
    qk_norm: bool = False  # of each head's query and key, as in Qwen3's blocks
    layer: LayerOptions = field(default_factory=LayerOptions)


OPTIONS = MTPOptions
