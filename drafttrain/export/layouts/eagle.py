"""EAGLE-1 and 2, whose networks are the same: one directory for vLLM and SGLang but for the architecture's name; LMDeploy's."""

from __future__ import annotations

import torch

from drafttrain.export.files import Files, Source
from drafttrain.export.layouts.llama import llama_fields

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "lmdeploy": "LlamaForCausalLM"}


def refuse(source: Source) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    bias = source.tensors.get("fc.bias")
    if source.stack in ("vllm", "lmdeploy") and bias is not None and bool(bias.any()):
        return f"its fc has a trained bias, for which {source.stack} has no place; train with drafter.bias=false"
    own = str(source.opened.loaded.target.dtype).removeprefix("torch.")
    if source.stack == "lmdeploy" and source.dtype not in (own, "float32"):
        return f"lmdeploy reads the target's embedding from its files, which is {own}; export with dtype={own}"
    return None


def files(source: Source) -> Files:
    """SGLang's fc always has a bias. "bias" stays false where there is one: true makes vLLM accept nothing, without a word."""
    config = {
        "architectures": [ARCHITECTURES[source.stack]],
        "model_type": "llama",
        **llama_fields(source.layer_shape, 1, source.dtype),
        "bias": False,
    }
    if source.stack == "lmdeploy":  # it takes no bias, and the embedding from here
        own = {name: x for name, x in source.tensors.items() if name != "fc.bias"}
        return Files(config, own | {"embed_tokens.weight": source.embedding})
    return Files(config, {"fc.bias": torch.zeros(source.shape.hidden_size)} | source.tensors)
