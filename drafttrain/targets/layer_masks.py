"""The attention masks of a transformers model: one for all its layers, or one for each type of layer.

Shapes: B rows, N new positions, P cached + new positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents, additive, attention_mask


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a layer sees; both None: to the start."""

    window: int | None = None  # positions, its own included
    chunk: int | None = None  # the positions of its own chunk of this size

    @property
    def bound(self) -> int | None:
        """Positions that a query sees at most."""
        return self.window if self.chunk is None else self.chunk


FULL = Reach()


class LayerMasks:
    """Makes the masks that a model with this text configuration takes."""

    def __init__(self, config: Any) -> None:
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        chunk = getattr(config, "attention_chunk_size", None)
        reach_by_type = {
            "full_attention": FULL,
            "sliding_attention": Reach(window=window),
            "chunked_attention": Reach(chunk=chunk),
        }
        layer_types = set(getattr(config, "layer_types", None) or ())
        reaches = {
            layer_type: reach_by_type.get(layer_type, FULL)
            for layer_type in layer_types | ({"full_attention", "sliding_attention"} if layer_types else set())
        }
        limited = window is not None or ("chunked_attention" in layer_types and chunk is not None)
        self.by_type = reaches if layer_types and limited else None  # None: one mask for all layers
        self.every = Reach(window=window)  # of all layers, where one mask serves them

    @property
    def longest(self) -> int:
        """The longest window or chunk; 0: every layer sees everything."""
        reaches = [self.every] if self.by_type is None else self.by_type.values()
        return max((reach.bound or 0 for reach in reaches), default=0)

    def __call__(
        self, kv: KVCache | None, ancestor_BNN: Tensor | Documents | None, position_BN: Tensor, dtype: torch.dtype
    ) -> Any:
        """Additive masks, [B, 1, N, P] each, as the model takes them."""

        def mask(reach: Reach) -> Tensor:
            return additive(attention_mask(kv, ancestor_BNN, position_BN, reach.window, reach.chunk), dtype)

        if self.by_type is None:
            return mask(self.every)
        mask_by_reach = {reach: mask(reach) for reach in set(self.by_type.values())}
        return {layer_type: mask_by_reach[reach] for layer_type, reach in self.by_type.items()}

    def unused(self, like: Tensor) -> Any:
        """Masks that no layer reads. They are given, so that transformers builds none."""
        none_11NP = like.new_zeros(1, 1, 1, 1)
        return none_11NP if self.by_type is None else dict.fromkeys(self.by_type, none_11NP)
