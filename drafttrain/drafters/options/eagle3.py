"""The options of eagle3."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.drafters.common.options import TreeOptions
from drafttrain.model.shapes import LayerOptions


@dataclass
class Eagle3Options(TreeOptions):
    """By default a chain over the target's whole vocabulary."""

    family: str = "eagle3"
    tree: str = "chain"
    steps: int = 3  # of training-time test
    draft_length: int = 4
    taps: list[int] | None = None  # three block outputs, from 0; None: by the rule
    tap_rule: str = "official"  # official: 1, n/2 - 1, n - 4. thirds: the last of each third of the n blocks
    step_decay: float = 0.8  # step i (from 0) weighs step_decay ** i in the loss
    draft_vocab: int | None = None  # so many of the target's tokens, the commonest in the training data; None: all
    fc_norm: bool = False  # EAGLE 3.1: an RMS norm of each tapped state
    norm_output: bool = False  # EAGLE 3.1: the normed state goes to the next step too
    norm_before_fc: bool = False  # one RMS norm of all tapped states together
    norm_before_residual: bool = False  # the residual is the normed state; officially not
    layers: int = 1  # of attention and MLP; only the first reads the embedding
    qk_norm: bool = False  # an RMS norm of each query and key, as in Qwen3's blocks
    own_embedding: bool = False  # the embedding is trained too; false: the target's
    layer: LayerOptions = field(default_factory=LayerOptions)


OPTIONS = Eagle3Options
