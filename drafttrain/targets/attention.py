"""An attention implementation for transformers' models: whole sequences need no mask tensor, however long they are.

Shapes: B rows, T positions, h heads, g KV heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafttrain.model.mask_chain_attention import attended
from drafttrain.model.masks import Documents
from drafttrain.model.target import FINAL, Taps

NAME = "drafttrain"
KINDS = {"full_attention", "sliding_attention"}  # layer types whose masks follow from documents and a window
UNSUPPORTED = ("s_aux", "position_bias", "softcap")  # score terms that the operator does not have


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
