"""The options of eagle."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.drafters.common.options import TreeOptions
from drafttrain.model.shapes import LayerOptions


@dataclass
class EagleOptions(TreeOptions):
    """The losses' weights are the official ones."""

    family: str = "eagle"
    tree: str = "chain"
    steps: int = 1  # forwards of training: the first on the target's features, each further one on the drafter's own
    draft_length: int = 4
    bias: bool = True  # of fc, as officially; not every serving stack has a place for one (docs/export.md)
    law_weight: float = 0.1  # of the divergence between the distributions
    feature_weight: float = 1.0  # of the smooth L1 distance between the features
    noise: float = 0.0  # uniform in +- noise * 512 / length, added to the target's features in training; officially 0.1
    top_weight: float = 0.0  # of a cross-entropy over the target's likeliest tokens alone (HASS: 1)
    top_k: int = 10  # how many those are
    layer: LayerOptions = field(default_factory=LayerOptions)


OPTIONS = EagleOptions
