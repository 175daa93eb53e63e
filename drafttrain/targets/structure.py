"""The structure of transformers models: blocks, dimensions, and unsupported features."""

from __future__ import annotations

from typing import Any

from torch import nn

from drafttrain.core.errors import UserError
from drafttrain.model.target import TargetShape


def lacking(model: Any) -> str | None:
    """The feature of a failed architecture that our cache and masks do not support; None if unknown."""
    base, config = model.base_model, model.config.get_text_config()
    if hasattr(base, "build_alibi_tensor") or getattr(config, "alibi", False):
        return "its alibi biases count positions along a 2-D mask, which rows of several lengths and draft trees do not have"
    return None


def find_blocks(model: nn.Module, blocks: int) -> nn.ModuleList:
    """The list of the model's decoder blocks. Raises UserError for a model without one."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == blocks:
            return module
    raise UserError(f"{type(model).__name__} has no list of its {blocks} blocks to tap; choose a decoder-only causal LM")


def set_depth(config: Any, blocks: int) -> Any:
    """Set the number of blocks of a transformers configuration, in place; layer types repeat. Returns its text part."""
    text = config.get_text_config()
    text.num_hidden_layers = blocks
    if types := getattr(text, "layer_types", None):
        text.layer_types = [types[i % len(types)] for i in range(blocks)]
    return text


def shape_of(config: Any) -> TargetShape:
    """The dimensions of a transformers text configuration. Raises UserError for a model without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise UserError(f"{type(config).__name__} has no attention heads and so no KV cache; choose another target")
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    norm_eps = getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_epsilon", None) or 1e-5
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return TargetShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        blocks=config.num_hidden_layers,
        heads=heads,
        kv_heads=heads if heads % kv_heads else kv_heads,  # latent attention ignores this field, so it may hold any number
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        max_positions=getattr(config, "max_position_embeddings", None) or 2048,
        rope_theta=float(theta),
        norm_eps=float(norm_eps),
    )
