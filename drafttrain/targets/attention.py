"""Attention of transformers' models: masks for passes with a cache, and an implementation for whole sequences.

A model has one mask for all its layers, or one for each type of layer (`LayerMasks`). Whole sequences need no mask tensor,
however long they are (`install`).

Shapes: B rows, T positions, N new positions, P cached + new positions, h heads, g KV heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafttrain.model.kv_cache import KVCache
from drafttrain.model.mask_chains import attended
from drafttrain.model.masks import Documents, additive, attention_mask
from drafttrain.model.target import FINAL, Taps

NAME = "drafttrain"
KINDS = {"full_attention", "sliding_attention"}  # layer types whose masks follow from documents and a window
RECURRENT = {"conv", "linear_attention", "mamba"}  # layer types whose masks would be of padding
UNSUPPORTED = ("s_aux", "position_bias", "softcap")  # score terms that the operator does not have


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
        return {
            layer_type: None if layer_type in RECURRENT else mask_by_reach[reach] for layer_type, reach in self.by_type.items()
        }

    def unused(self, like: Tensor) -> Any:
        """Masks that no layer reads. They are given, so that transformers builds none."""
        none_11NP = like.new_zeros(1, 1, 1, 1)
        return none_11NP if self.by_type is None else dict.fromkeys(self.by_type, none_11NP)


def attention(
    module: torch.nn.Module,
    q_BhTD: Tensor,
    k_BgTD: Tensor,
    v_BgTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    whole: bool = False,
    documents: Documents | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, or for whole sequences our operator, which ignores the mask."""
    if not whole:
        options = {"scaling": scaling, "sliding_window": sliding_window, **more}
        mixed_BThD, _ = sdpa_attention_forward(module, q_BhTD, k_BgTD, v_BgTD, attention_mask, **options)
        return mixed_BThD, None
    if any(more.get(name) is not None for name in UNSUPPORTED):
        raise ValueError(f"whole sequences are attended to without {', '.join(UNSUPPORTED)}")
    mixed_BhTD = attended(q_BhTD, k_BgTD, v_BgTD, documents, sliding_window, scaling)
    return mixed_BhTD.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@torch.no_grad()
def install(target: Any) -> bool:
    """Use this attention in the target's model. Returns whether whole sequences then run without masks.

    False if the states would differ from those with masks: the model does not use `sdpa`, a layer attends to something else
    than a window of earlier positions, or the model drops the arguments.
    """
    model: PreTrainedModel = target.backbone.module  # the text part: an encoder's attention has arguments of its own
    config = model.config
    if not set(getattr(config, "layer_types", None) or ()) <= KINDS or not model._supports_attention_backend:
        return False
    if config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME or target.device.type == "meta":
        return bool(config._attn_implementation == NAME)
    token_1T = torch.arange(9, device=target.device)[None] % target.shape.vocab_size
    number_1T, position_1T = (torch.tensor([row], device=target.device) for row in ([0] * 4 + [1] * 5, [*range(4), *range(5)]))
    final_states = []
    for target.unmasked in (False, True):
        try:
            out = target(token_1T, None, Documents(number_1T), position_1T, Taps(final=True), token_1T[:, :0])
        except (TypeError, ValueError, RuntimeError):
            return False
        final_states.append(out.hidden[FINAL].float())
    gap = (final_states[1] - final_states[0]).norm() / final_states[0].norm()
    return bool(gap < torch.finfo(target.dtype).eps ** 0.5)
