"""Fields of a configuration that all layouts with decoder layers of our own share."""

from __future__ import annotations

from typing import Any

from drafttrain.model.layers import LayerShape
from drafttrain.model.target import TargetShape


def llama_fields(shape: TargetShape, layers: int, dtype: str) -> dict[str, Any]:
    """Every one is written: stacks differ in what they take otherwise, and the target's own scaling of positions is not the
    drafter's, which has none.
    """
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling if isinstance(shape, LayerShape) else None,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
