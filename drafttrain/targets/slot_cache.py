"""Our KV cache behind the interface that transformers' models use.

Shapes: B rows, h heads, N new positions, P cached + new positions, D width, C channels and W + 1 columns of a convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache

from drafttrain.model.kv_cache import KVCache
from drafttrain.targets.recurrent import Recorder


class _RecurrentLayer:
    """A layer's states where transformers before 5.20 look for them."""

    record_past = True

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        return {0: None}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        return {0: self._recorder.states.scan_state(self._number)}


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
    Recurrent layers get copies of the committed states, which stay as they are until the cache commits positions.
    """

    def __init__(self, kv: KVCache, blocks: int, shapes: dict[int, RowShape], recorder: Recorder | None = None) -> None:
        """shapes: gets the row shape of every layer that writes. recorder: of a model with recurrent layers."""
        layers: list[Any] = [] if recorder is None else [_RecurrentLayer(recorder, number) for number in range(blocks)]
        super().__init__(layers=layers)
        self.kv, self.blocks, self.shapes, self.recorder = kv, blocks, shapes, recorder

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

    # -- recurrent layers

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Then convolutions give all their inputs to `update_conv_state`, and write nothing themselves."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        assert self.recorder is not None
        return self.recorder.states.scan_state(layer_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """A convolution's new inputs, [B, C, N] -> those and the W before them, [B, C, W + N]."""
        assert self.recorder is not None and conv_kernel_size is not None
        self.recorder.layer = layer_idx
        return self.recorder.states.convolution_inputs(layer_idx, conv_states, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        assert self.recorder is not None
        self.recorder.states.finish(layer_idx, recurrent_states)
        return recurrent_states

    # -- lengths

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
