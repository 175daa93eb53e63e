"""Medusa: vLLM's layout, and the authors' names in the form that text-generation-inference reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.renames import Renames

VLLM = Renames(
    {"heads.{i}.blocks.{j}.linear.{part}": "blocks.{i}.layers.{j}.{part}", "heads.{i}.output.weight": "lm_heads.{i}.weight"}
)


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    own = str(source.opened.loaded.target.dtype).removeprefix("torch.")
    if source.options["init"] == "share" and source.dtype not in (own, "float32"):
        return f"its heads share the target's output matrix, which is {own}; export with dtype={own}"
    return None


def vllm(source: ExportSource) -> Files:
    """vLLM's layout."""
    shape, options = source.shape, source.options
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
    return Files(config, _tensors(source, VLLM), facts=_facts(source))


def official(source: ExportSource) -> Files:
    """The authors' names in a safetensors file. It has no `architectures`, because text-generation-inference takes a directory
    with them for a model.

    `hidden_size` and `medusa_fc_bias` let vLLM 0.32 load it too.
    """
    options = source.options
    config = {
        "medusa_num_heads": options["heads"],
        "medusa_num_layers": options["layers"],
        "base_model_name_or_path": source.target_name,
        "hidden_size": source.shape.hidden_size,
        "medusa_fc_bias": True,
        "torch_dtype": source.dtype,
    }
    tensors = _tensors(source, official_names(options["layers"]))
    return Files(config, tensors, "medusa_lm_head.safetensors", facts=_facts(source))


def official_names(layers: int) -> Renames:
    """The names in the authors' layout, where a head is a sequence: its blocks, then the output matrix."""
    return Renames(
        {
            "heads.{i}.blocks.{j}.linear.{part}": "{i}.{j}.linear.{part}",
            "heads.{i}.output.weight": f"{{i}}.{layers}.weight",
        }
    )


def _tensors(source: ExportSource, renames: Renames) -> dict[str, Tensor]:
    """Every head with its output matrix, which may be the target's."""
    outputs = {str(renames.theirs(f"heads.{head}.output.weight")) for head in range(source.options["heads"])}
    return dict.fromkeys(sorted(outputs), source.opened.target.head_weight) | source.named(renames)


def _facts(source: ExportSource) -> dict[str, Any]:
    return {"heads of the drafter": source.options["heads"]}
