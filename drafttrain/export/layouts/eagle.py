"""EAGLE-1 and 2, whose networks are the same: one directory for vLLM and SGLang but for the architecture's name."""

from __future__ import annotations

import torch

from drafttrain.export.files import Files, Source
from drafttrain.export.layouts.llama import llama_fields

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}


def refuse(source: Source) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    bias = source.tensors.get("fc.bias")
    if source.stack == "vllm" and bias is not None and bool(bias.any()):
        return "its fc has a trained bias, for which vllm has no place; train with drafter.bias=false"
    return None


def files(source: Source) -> Files:
    """SGLang's fc always has a bias. "bias" stays false where there is one: true makes vLLM accept nothing, without a word."""
    config = {
        "architectures": [ARCHITECTURES[source.stack]],
        "model_type": "llama",
        **llama_fields(source.layer_shape, 1, source.dtype),
        "bias": False,
    }
    return Files(config, {"fc.bias": torch.zeros(source.shape.hidden_size)} | source.tensors)
