"""A drafter's decoder layers in decoding: joined weights, fused operators, and a KV cache of their own.

Shapes: B rows, N new positions, M nodes of a tree so far, P positions, D head width, H hidden, X width of an input.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafttrain.model.attention import AttentionMetadata, attend
from drafttrain.model.decoder_block import LATENT, Blocks, DecoderBlock, heads_of, rotary_order
from drafttrain.model.joint import PACKED_BYTES, Joint
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import Attention, DecoderLayer, MultiHeadLatentAttention
from drafttrain.ops import library
from drafttrain.ops.tree_bits import MOST_NODES, WORD, causal_bits

PAST = 2 * MOST_NODES  # positions of padding columns that may follow a slot's last one
AT_ONCE = 2 * MOST_NODES  # positions that one pass may write, or a slot go back, where a cache keeps a window alone


class JoinedLayers:
    """Modules whose weights are joined and packed for decoding; the modules keep theirs."""

    def __init__(self, modules: Sequence[nn.Module], joints: Sequence[Joint]) -> None:
        self.modules, self.joints = modules, joints

    def refresh(self) -> bool:
        """Take the modules' current weights. Returns whether they have changed since the last call."""
        weights = [p for module in self.modules for p in module.parameters()]
        packed = sum(p.numel() * p.element_size() for p in weights) <= PACKED_BYTES
        on_cpu, frozen = weights[0].device.type == "cpu", not any(p.requires_grad for p in weights)
        share = frozen and not (packed and on_cpu)  # views would equal the joined weight, and a packed copy become stale
        with torch.inference_mode(False):  # weights that are views of the joined ones may be trained later
            changed = [joint.join(share, packed) for joint in self.joints]
        return any(changed)


def _block(layer: DecoderLayer) -> DecoderBlock:
    """The layer as decoding runs it; one with latent attention caches latents."""
    attention = layer.self_attn
    if not isinstance(attention, MultiHeadLatentAttention):
        return DecoderBlock(layer, attention.shape.window)
    width = attention.qk_rope_head_dim
    return DecoderBlock(layer, kind=LATENT, order_D=rotary_order(width, width // 2, LATENT.interleaved))


class FusedLayers:
    """Decoder layers that decoding runs with few operations.

    Weights are joined by `refresh`, which `CachedLayers` calls at the start of a session. A copy joins its own weights.
    """

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = list(layers)
        self.chain = [_block(layer) for layer in layers]
        self._joined = JoinedLayers(self.layers, [joint for block in self.chain for joint in block.joints])
        self._blocks: Blocks | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedLayers:
        return FusedLayers([copy.deepcopy(layer, memo) for layer in self.layers])

    @property
    def attention(self) -> Attention:
        return self.layers[0].self_attn

    @property
    def window(self) -> int | None:
        """Positions that any layer sees at most; None: one sees all."""
        windows = [layer.self_attn.shape.window for layer in self.layers]
        return None if None in windows else max(window or 0 for window in windows)

    def refresh(self) -> None:
        """Take the layers' current weights."""
        if not self._joined.refresh():
            return
        for block in self.chain:
            block.changed()
        weights = [block.weights() for block in self.chain]
        fusable_weights = [w for w in weights if w is not None]
        whole_call = len(fusable_weights) == len(weights) and library.has_product()
        self._blocks = Blocks(fusable_weights, self.layers[0].post_attention_layernorm.eps) if whole_call else None

    def run(
        self, x_BNH: Tensor, meta: AttentionMetadata | Sequence[AttentionMetadata], read_BNX: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x, delta): the last layer's output is their sum. x_BNH, the residual stream, may be changed in place.

        meta: one for all layers, or one for each. read_BNX: the input of the first layer's projections; None: the norm of x.
        """
        metas = [meta] * len(self.chain) if isinstance(meta, AttentionMetadata) else meta
        if self._blocks is not None and metas[0].compiled and all(block_meta is metas[0] for block_meta in metas):
            x_BNH, delta_BNH, _ = self._blocks.run(x_BNH.contiguous(), metas[0], (), read_BNX)
            assert delta_BNH is not None
            return x_BNH, delta_BNH
        delta: Tensor | None = None
        for layer_index, (block, block_meta) in enumerate(zip(self.chain, metas, strict=True)):
            x_BNH, delta = block.forward(x_BNH, delta, block_meta, layer_index, None if layer_index else read_BNX)
        assert delta is not None
        return x_BNH, delta

    def write(self, read: Tensor | Sequence[Tensor], meta: AttentionMetadata) -> None:
        """Write every layer's keys and values of positions that have no queries. read: one input [B, N, X], or one for each."""
        inputs = [read] * len(self.chain) if isinstance(read, Tensor) else read
        for layer_index, (block, read_BNX) in enumerate(zip(self.chain, inputs, strict=True)):
            block.write(read_BNX, meta, layer_index)


class FusedAttention:
    """One attention module without an MLP."""

    def __init__(self, attention: Attention) -> None:
        self.attention, self.shape = attention, heads_of(attention, attention.shape.window)
        self.qkv, self.out = Joint([attention.q_proj, attention.k_proj, attention.v_proj]), Joint([attention.o_proj])
        self._joined = JoinedLayers([attention], [self.qkv, self.out])

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedAttention:
        return FusedAttention(copy.deepcopy(self.attention, memo))

    @property
    def layers(self) -> list[FusedAttention]:
        return [self]

    def refresh(self) -> None:
        """Take the module's current weights."""
        self._joined.refresh()

    def run(self, read_BNX: Tensor, meta: AttentionMetadata) -> Tensor:
        """[B, N, H]: attention's output."""
        return self.out(attend(self.qkv(read_BNX), meta, 0, self.shape))


class Layers(Protocol):
    """Layers that `CachedLayers` opens."""

    @property
    def layers(self) -> Sequence[Any]: ...

    @property
    def attention(self) -> Attention: ...

    def refresh(self) -> None: ...


class CachedPositions:
    """A session's KV cache of some layers, whose positions are committed from the front."""

    kv: KVCache

    def after_prefix(self, columns: int) -> Tensor:
        """[B, N] the positions of so many columns after each row's prefix."""
        return self.kv.length_B[:, None] + torch.arange(columns, device=self.kv.device)

    def keep_first(self, count_B: Tensor) -> None:
        """Commit the first `count_B` scratch positions of each row; drop the rest."""
        self.kv.crop(self.kv.length_B + count_B)


class CachedLayers(CachedPositions):
    """A session's KV cache of some layers of one shape, and the rotary angles of its positions."""

    def __init__(
        self,
        layers: Layers,
        slots: int,
        max_len: int,
        angles: tuple[Tensor, Tensor] | None = None,
        window: int | None = None,
    ) -> None:
        """angles: as `Attention.angle_table` gives them; None: for the cache's capacity. window: no layer sees more positions,
        and no pass writes more than `AT_ONCE`, so that memory for both together is enough; None: memory for all positions."""
        layers.refresh()
        attention, weight = layers.attention, layers.attention.o_proj.weight
        retained, max_rollback = (None, None) if window is None else (window + AT_ONCE, AT_ONCE)
        self.kv = KVCache(len(layers.layers), slots, max_len, weight.device, kept=retained, back=max_rollback)
        heads, width, value_width = attention.cached
        self.kv.allocate(heads, width, weight.dtype, value_width)
        self._causal_N1 = causal_bits(WORD, weight.device)
        self.cos_PD, self.sin_PD = angles or attention.angle_table(self.kv.capacity + PAST)

    def meta(
        self,
        position_BN: Tensor,
        ancestor_BNN: Tensor | None = None,
        bits_BNw: Tensor | None = None,
        earlier: int = 0,
    ) -> AttentionMetadata:
        """The metadata of one pass over new positions of the rows in use, for `run`; arguments as `AttentionMetadata`."""
        total_length = earlier + position_BN.shape[1]
        if ancestor_BNN is None and bits_BNw is None and total_length <= WORD:
            bits_BNw = self._causal_N1[earlier:total_length].expand(len(position_BN), -1, -1)
        return AttentionMetadata(self.kv, position_BN, ancestor_BNN, self.cos_PD, self.sin_PD, bits_BNw, earlier)
