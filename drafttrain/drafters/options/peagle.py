"""The options of peagle."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.drafters.common.options import TreeOptions
from drafttrain.model.shapes import LayerOptions


@dataclass
class PEagleOptions(TreeOptions):
    """By default a chain over the target's whole vocabulary."""

    family: str = "peagle"
    tree: str = "chain"
    width: int = 4
    draft_length: int = 8
    layers: int = 4
    taps: list[int] | None = None  # three block outputs, from 0; None: by the rule
    tap_rule: str = "official"  # official: 1, n/2 - 1, n - 4. thirds: the last of each third of the n blocks
    mask_token: int | None = None  # an id of the embedding; None: the last one
    retention: float = 0.8  # in training a share retention ** d of the anchors has a slot d
    least_retention: float = 0.2  # and no less than this
    draft_vocab: int | None = None  # so many of the target's tokens, the commonest in the training data; None: all
    fc_norm: bool = False  # EAGLE 3.1: an RMS norm of each tapped state
    norm_before_fc: bool = False  # one RMS norm of all tapped states together
    qk_norm: bool = False  # an RMS norm of each query and key, as in Qwen3's blocks
    norm_before_residual: bool = False  # the residual of the first layer is the normed state
    layer: LayerOptions = field(default_factory=LayerOptions)


OPTIONS = PEagleOptions
