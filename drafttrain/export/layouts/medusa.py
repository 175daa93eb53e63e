"""Medusa: vLLM's layout, and the authors', which text-generation-inference reads too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from drafttrain.export.files import Files, Source

TIED = "its heads have {} blocks each, and the authors' code repeats one; train with drafter.layers=1"


def refuse(source: Source) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    own = str(source.opened.loaded.target.dtype).removeprefix("torch.")
    if source.options["init"] == "share" and source.dtype not in (own, "float32"):
        return f"its heads share the target's output matrix, which is {own}; export with dtype={own}"
    if source.stack == "official" and source.options["layers"] > 1:
        return TIED.format(source.options["layers"])
    return None


def vllm(source: Source) -> Files:
    shape, options = source.shape, source.options
    tensors = {}
    for head in range(options["heads"]):
        tensors[f"lm_heads.{head}.weight"] = _output(source, head)
        for layer in range(options["layers"]):
            for part in ("weight", "bias"):
                tensors[f"blocks.{head}.layers.{layer}.{part}"] = _block(source, head, layer, part)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "num_heads": options["heads"],
        "num_hidden_layers": options["layers"],
        "medusa_fc_bias": True,
        "torch_dtype": source.dtype,
    }
    return Files(config, tensors, facts=_facts(source))


def official(source: Source) -> Files:
    """Without `architectures`: text-generation-inference takes a directory that has them for a whole model. `hidden_size` and
    `medusa_fc_bias` make vLLM 0.32 load it too.
    """
    options, tensors = source.options, {}
    for head in range(options["heads"]):
        tensors[f"{head}.{options['layers']}.weight"] = _output(source, head)
        for layer in range(options["layers"]):
            for part in ("weight", "bias"):
                tensors[f"{head}.{layer}.linear.{part}"] = _block(source, head, layer, part)
    config = {
        "medusa_num_heads": options["heads"],
        "medusa_num_layers": options["layers"],
        "base_model_name_or_path": source.target_name,
        "hidden_size": source.shape.hidden_size,
        "medusa_fc_bias": True,
        "torch_dtype": source.dtype,
    }
    return Files(config, tensors, "medusa_lm_head.safetensors", facts=_facts(source))


def _output(source: Source, head: int) -> Tensor:
    """A head's own output matrix, or the target's that all heads share."""
    own = source.tensors.get(f"heads.{head}.output.weight")
    return source.opened.target.head_weight if own is None else own


def _block(source: Source, head: int, layer: int, part: str) -> Tensor:
    return source.opened.tensors[f"heads.{head}.blocks.{layer}.linear.{part}"]


def _facts(source: Source) -> dict[str, Any]:
    return {"heads of the drafter": source.options["heads"]}
