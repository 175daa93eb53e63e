"""Targets with random weights, made from transformers' configurations; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

ENDLESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}  # or transformers' generate would stop by itself
SMALL = ENDLESS | {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "head_dim": 16}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
MEDIUM = SMALL | {"vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 2816, "head_dim": 64}
MEDIUM |= {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048}

LADDER: dict[str, PreTrainedConfig] = {
    "llama-tiny": LlamaConfig(**SMALL),
    "qwen3-tiny": Qwen3Config(**SMALL),
    "llama-medium": LlamaConfig(**MEDIUM),
}

HELD = 32_768  # positions of the timed models, enough for their rotary tables


def _shape(
    hidden: int, blocks: int, inner: int, vocab: int, width: int, theta: float, tied: bool, heads: int = 32
) -> dict[str, Any]:
    """All have 8 KV heads."""
    of = {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": width, "max_position_embeddings": HELD}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "tie_word_embeddings": tied}
    sizes = {"hidden_size": hidden, "num_hidden_layers": blocks, "intermediate_size": inner, "vocab_size": vocab}
    return ENDLESS | sizes | of | rope


TIMED: dict[str, PreTrainedConfig] = {
    "Llama-3.1-8B": LlamaConfig(**_shape(4096, 32, 14336, 128_256, 128, 5e5, tied=False)),
    "Llama-3.2-1B": LlamaConfig(**_shape(2048, 16, 8192, 128_256, 64, 5e5, tied=True)),
    "Llama-3.3-70B-8-blocks": LlamaConfig(**_shape(8192, 8, 28672, 128_256, 128, 5e5, tied=False, heads=64)),
    "Qwen3-4B": Qwen3Config(**_shape(2560, 36, 9728, 151_936, 128, 1e6, tied=True)),
}
REHEARSED = {"tiny": LADDER["qwen3-tiny"]}


def random_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, spread: float | None = None) -> Any:
    """spread: standard deviation of every matrix times the root of its width, so that a greedy text is no constant; None:
    transformers' initialisation.
    """
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if spread is not None:
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.data.normal_(0.0, spread / weight.shape[1] ** 0.5)
    return model.eval()
