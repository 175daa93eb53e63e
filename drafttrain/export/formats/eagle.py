"""EAGLE-1 and 2, which have the same network: `fc`, then one layer without an input norm.

The layouts of vLLM, SGLang and LMDeploy differ in the architecture's name, in the bias of `fc`, and in the embedding.
"""

from __future__ import annotations

from typing import Any

import torch

from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.format import ENGINE_ENDED, NOT_STRICT, ConvertedDrafter, Format, Importer, Rows, StackRow
from drafttrain.export.layers import layer_options, llama_fields, refuse_windows
from drafttrain.export.target_ends import EMBEDDING, HEAD, refuse_bias, refuse_embedding
from drafttrain.model.target import Target

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "lmdeploy": "LlamaForCausalLM"}
ATTENTION = "layers.0.self_attn.q_proj.weight"


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    bias = source.tensors.get("fc.bias")
    if source.stack in ("vllm", "lmdeploy") and bias is not None and not bias.is_meta and bool(bias.any()):
        return f"its fc has a trained bias, which {source.stack} cannot load; train with drafter.bias=false"
    target_dtype = str(source.opened.loaded.target.dtype).removeprefix("torch.")
    if source.stack == "lmdeploy" and source.dtype not in (target_dtype, "float32"):
        return (
            f"lmdeploy reads the target's embedding, which is {target_dtype}, from the drafter's files; export with "
            f"dtype={target_dtype}"
        )
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
        tensors = {name: x for name, x in source.tensors.items() if name != "fc.bias"}
        return Files(config, tensors | {"embed_tokens.weight": source.embedding})
    return Files(config, {"fc.bias": torch.zeros(source.shape.hidden_size)} | source.tensors)


def _knows(checkpoint: ExternalCheckpoint) -> bool:
    return checkpoint.has("fc.weight", ATTENTION) and not any("hidden_norm" in name for name in checkpoint.kinds)


def _options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    """The tensor decides about the bias: zeros count as none, because `bias` in config.json is false for SGLang too."""
    checkpoint.wants(
        "num_hidden_layers", checkpoint.config.get("num_hidden_layers", 1), (1,), "but drafters of this family have one layer"
    )
    has_bias = checkpoint.has("fc.bias") and bool(checkpoint.tensors["fc.bias"].any())
    return {
        "bias": has_bias or checkpoint.config.get("bias") is True,
        "layer": layer_options(checkpoint, checkpoint.config, target),
    }


def _mend(draft: ConvertedDrafter) -> None:
    if not draft.options["bias"]:
        draft.tensors.pop("fc.bias", None)
    elif draft.found.config.get("bias") is False:
        draft.notes.append("config.json says bias false, but fc.bias is not zero: it is used, as in SGLang; vLLM ignores it")


IMPORTER = Importer(
    "EAGLE-1",
    "eagle",
    _knows,
    _options,
    shared={"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD},
    mend=_mend,
)
IMPORTERS = [IMPORTER]
EAGLE_1 = Format(IMPORTER.name, files, IMPORTER, refuse)
ROWS: Rows = {
    "eagle": {
        "vllm": StackRow(EAGLE_1, "eagle", quantised=True),
        "sglang": StackRow(EAGLE_1, "EAGLE", quantised=True),
        "trtllm": ENGINE_ENDED,
        "lmdeploy": StackRow(EAGLE_1, "eagle"),
        "official": NOT_STRICT,
    }
}
