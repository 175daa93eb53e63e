"""The options of hydra."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import TreeOptions


@dataclass
class HydraOptions(TreeOptions):
    """K sequentially dependent heads; with `prefix_layer` Hydra++."""

    family: str = "hydra"
    heads: int = 4
    layers: int = 4  # blocks per head; the first one narrows state and embeddings to the hidden size
    prefix_layer: bool = False  # one decoder layer over the target's states, with its own KV cache
    head_decay: float = 1.0  # head k (from 1) weighs head_decay ** k in the loss


OPTIONS = HydraOptions
