"""One decoder block of a target's own class as a drafter's layer: trained on its own outputs, and decoding with our KV cache.

transformers' modules compute it: whatever attention and MLP the target's full-attention blocks have (biases, gates, latents,
experts). Shapes: B rows, N new positions, P positions that they see, T positions of a sequence, h heads, D width of a key,
H hidden.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafttrain.core.errors import UserError
from drafttrain.model.batch import TrainBatch
from drafttrain.model.cached_layers import CachedPositions
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents, additive, attention_mask
from drafttrain.model.unrolled_attention import unrolled as unrolled_attention
from drafttrain.ops.tree_bits import ancestors_of
from drafttrain.targets.attention import LayerMasks
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.recurrent import extra_layers
from drafttrain.targets.structure import cache_argument, find_blocks, set_depth

FULL, NAME = "full_attention", "drafttrain_block"
_cache_argument = functools.cache(cache_argument)  # it is asked for in every step


def new_block(target: HFTarget, number: int = 0) -> nn.Module:
    """A block as one more after the target's last would be, in float32, with fresh weights. Its attention sees all positions.

    number: of its layer in the cache.

    Raises UserError for an architecture whose blocks cannot be built or run alone.
    """
    name = type(target.model).__name__
    blocks: Any = find_blocks(target.model, target.shape.blocks)
    usable_blocks = [block for block in blocks if hasattr(block, "self_attn") and hasattr(block, "input_layernorm")]
    if not usable_blocks or getattr(target.backbone.module, "rotary_emb", None) is None or not target.model._supports_sdpa:
        raise UserError(
            f"{name} has no block with plain attention and rotary positions of the usual names; choose another family"
        )
    config = copy.deepcopy(target.backbone.module.config)
    if LayerMasks(config).longest:
        raise UserError(f"{name} has sliding windows or chunks, which a module of its own blocks is not trained with here")
    if extra_layers(config):
        raise UserError(f"{name} has blocks that keep index keys besides keys and values; choose another family")
    last = config.num_hidden_layers
    set_depth(config, last + 1)
    if layer_types := getattr(config, "layer_types", None):
        try:
            config.layer_types = [*layer_types[:last], FULL if FULL in layer_types else layer_types[last]]
        except AttributeError as error:
            raise UserError(f"{name} derives its layer types from other options; choose another family") from error
    config._attn_implementation = NAME
    block: Any = type(usable_blocks[-1])(config, last)
    block.self_attn.layer_idx = number
    block.apply(target.model._init_weights)
    return block.float()


def new_norm(block: Any, width: int, eps: float) -> nn.Module:
    """A norm as the block has before its attention, which adds nothing at the start."""
    norm = type(block.input_layernorm)(width, eps=eps).float()
    norm.load_state_dict(block.input_layernorm.state_dict())
    return norm


@dataclass(frozen=True, slots=True)
class BlockPass:
    """What the block needs to know of one pass."""

    position_BN: Tensor
    mask_B1NP: Tensor | None  # additive
    cache: Any  # has `update`, as transformers' caches
    more: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `attention`


def forward(block: Any, rotary: Any, x_BNH: Tensor, step: BlockPass) -> Tensor:
    """[B, N, H] the block's output. rotary: the target's module that makes the angles."""
    in_parts = hasattr(rotary, "mrope_section")  # temporal, vertical and horizontal, which are the same for text
    out = block(
        x_BNH,
        attention_mask=step.mask_B1NP,
        position_ids=step.position_BN,
        position_embeddings=rotary(x_BNH, step.position_BN.expand(3, -1, -1) if in_parts else step.position_BN),
        **{_cache_argument(type(block).forward): step.cache},
        **step.more,
    )
    return out[0] if isinstance(out, tuple) else out


class SlotKeys:
    """Our KV cache of one layer, as attention modules of transformers use a cache."""

    def __init__(self, kv: KVCache, earlier: int) -> None:
        self.kv, self.earlier = kv, earlier

    def update(self, key_BhND: Tensor, value_BhND: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.kv.append(layer_idx, key_BhND, value_BhND, self.earlier)
        return self.kv.read(layer_idx, self.earlier + key_BhND.shape[2])


class BlockPositions(CachedPositions):
    """A session's KV cache of the block."""

    def __init__(self, layers: int, slots: int, positions: int, like: Tensor) -> None:
        """layers: blocks that cache their keys here. like: a tensor of the blocks' device and dtype."""
        self.kv, self.dtype = KVCache(layers, slots, positions, like.device), like.dtype

    def meta(
        self, position_BN: Tensor, ancestor_BNN: Tensor | None = None, bits_BNw: Tensor | None = None, earlier: int = 0
    ) -> BlockPass:
        """As `CachedLayers.meta`."""
        B, N = position_BN.shape
        if bits_BNw is not None:
            ancestor_BNN = ancestors_of(bits_BNw, earlier + N)
        elif ancestor_BNN is None and earlier:  # a chain
            visible_NM = torch.ones(N, earlier + N, dtype=torch.bool, device=position_BN.device).tril(earlier)
            ancestor_BNN = visible_NM.expand(B, -1, -1)
        mask_BNP = attention_mask(self.kv, ancestor_BNN, position_BN, None)[..., : self.kv.capacity]
        return BlockPass(position_BN, additive(mask_BNP, self.dtype), SlotKeys(self.kv, earlier))


class StepKeys:
    """Keys and values of earlier steps of training, and those of this one, which `update` adds."""

    def __init__(self, past: Sequence[Tensor]) -> None:
        """past: of each earlier step, all keys first."""
        steps = len(past) // 2
        self.keys, self.values = list(past[:steps]), list(past[steps:])

    def update(self, key_BhTD: Tensor, value_BhTD: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = [*self.keys, key_BhTD], [*self.values, value_BhTD]
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


def unrolled_pass(batch: TrainBatch, step: int, cache: StepKeys) -> BlockPass:
    """Of training on own outputs: step i at index t sees the first step of the cache over 0..t, and only index t of its others.

    step: of the tokens and positions, from 0.
    """
    attention_kwargs = {"unrolled": len(cache.keys) + 1, "documents": batch.sees()}
    return BlockPass(batch.position_BT + step, None, cache, attention_kwargs)


def attention(
    module: nn.Module,
    q_BhND: Tensor,
    k_BgPD: Tensor,
    v_BgPD: Tensor,
    mask_B1NP: Tensor | None,
    scaling: float | None = None,
    unrolled: int | None = None,
    documents: Documents | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, or for `unrolled` steps of training our operator, which needs no masks of whole sequences.

    The operator has one width and scales by it: narrower keys or values are padded.
    """
    if unrolled is None:
        mixed_BNhD, _ = sdpa_attention_forward(module, q_BhND, k_BgPD, v_BgPD, mask_B1NP, scaling=scaling, **more)
        return mixed_BNhD, None
    value_width, padded_width = v_BgPD.shape[-1], max(q_BhND.shape[-1], v_BgPD.shape[-1])
    scale = (q_BhND.shape[-1] ** -0.5 if scaling is None else scaling) * padded_width**0.5
    q_BhTD, k_BgPD, v_BgPD = (F.pad(x, (0, padded_width - x.shape[-1])) for x in (q_BhND * scale, k_BgPD, v_BgPD))
    keys, values = k_BgPD.chunk(unrolled, 2), v_BgPD.chunk(unrolled, 2)
    mixed_BhTD = unrolled_attention(q_BhTD, keys, values, documents)
    return mixed_BhTD[..., :value_width].transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
