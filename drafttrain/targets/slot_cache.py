"""Our KV cache behind the interface that transformers' models use.

Shapes: B rows, h heads, N new positions, P cached + new positions, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache

from drafttrain.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a layer writes for each position."""

    heads: int
    width: int  # of keys
    value_width: int


def extra_layers(config: Any) -> int:
    """Layers of the cache after those of the blocks: one per block that keeps index keys (sparse attention)."""
    return int(config.num_hidden_layers) if getattr(config, "index_topk", None) else 0


class SlotCache(Cache):
    """Layers write scratch positions and read the whole row back.

    Latent attention caches "keys" of one width and "values" of another. Index keys are a layer of keys without values.
    """

    def __init__(self, kv: KVCache, blocks: int, shapes: dict[int, RowShape]) -> None:
        """shapes: gets the row shape of every layer that writes."""
        super().__init__(layers=[])
        self.kv, self.blocks, self.shapes = kv, blocks, shapes

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, [B, h, N, D] -> [B, h, P, D]."""
        self.shapes[layer_idx] = RowShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.kv.append(layer_idx, key_states, value_states)
        return self.kv.read(layer_idx, key_states.shape[2])

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Index keys, [B, N, D] -> [B, P, D]."""
        keys_B1ND = indexer_key_states[:, None]
        return self.update(keys_B1ND, keys_B1ND[..., :0], self.blocks + layer_idx)[0][:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.kv.longest + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.kv.layers

    @property
    def is_compileable(self) -> bool:
        return False
