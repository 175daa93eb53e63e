"""EAGLE-1 and 2, which have the same network: for vLLM and SGLang, apart from the architecture's name, and for LMDeploy."""

from __future__ import annotations

import torch

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.llama import llama_fields, refuse_windows
from drafttrain.export.layouts.target_ends import refuse_bias, refuse_embedding

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "lmdeploy": "LlamaForCausalLM"}


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    bias = source.tensors.get("fc.bias")
    if source.stack in ("vllm", "lmdeploy") and bias is not None and bool(bias.any()):
        return f"its fc has a trained bias, which {source.stack} cannot load; train with drafter.bias=false"
    own = str(source.opened.loaded.target.dtype).removeprefix("torch.")
    if source.stack == "lmdeploy" and source.dtype not in (own, "float32"):
        return f"lmdeploy reads the target's embedding, which is {own}, from the drafter's files; export with dtype={own}"
    return refuse_windows(source) or refuse_embedding(source) or refuse_bias(source)


def files(source: ExportSource) -> Files:
    """SGLang's fc always has a bias. "bias" stays false even so, because with true vLLM silently accepts no drafts."""
    config = {
        "architectures": [ARCHITECTURES[source.stack]],
        "model_type": "llama",
        **llama_fields(source.layer_shape, 1, source.dtype),
        "bias": False,
    }
    if source.stack == "lmdeploy":  # it loads no bias, and reads the embedding from these files
        own = {name: x for name, x in source.tensors.items() if name != "fc.bias"}
        return Files(config, own | {"embed_tokens.weight": source.embedding})
    return Files(config, {"fc.bias": torch.zeros(source.shape.hidden_size)} | source.tensors)
