"""Tiny random models for tests."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from drafttrain.targets.hf import HFTarget

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}
GATED = COMMON | {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GATED),
    "mistral-sliding": MistralConfig(**GATED, sliding_window=6),
    "qwen2": Qwen2Config(**{k: v for k, v in GATED.items() if k != "head_dim"}),
    "qwen3": Qwen3Config(**GATED),
    "gemma3-sliding": Gemma3TextConfig(
        **GATED,
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=512),
    "opt": OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=32),
    "phi": PhiConfig(**COMMON, intermediate_size=48),
    "falcon": FalconConfig(**{**COMMON, "new_decoder_architecture": False, "alibi": False}),
}


def tiny_model(name: str = "llama", seed: int = 0) -> torch.nn.Module:
    """A random model with weights large enough that its greedy text is no constant."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name], attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 1.2 / parameter.shape[1] ** 0.5)
    return model


def tiny_target(name: str = "llama", seed: int = 0, stop: frozenset[int] = frozenset()) -> HFTarget:
    return HFTarget(tiny_model(name, seed), stop)


def prompts(count: int, vocab: int = 64, seed: int = 0, longest: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
