"""Hydra: the authors' layout. Our drafter's tensors already have its names."""

from __future__ import annotations

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.target_ends import refuse_embedding


def refuse(source: ExportSource) -> str | None:
    """Why the authors' code cannot load this drafter; None where it can."""
    if source.options["prefix_layer"]:
        return "its prefix layer (Hydra++) has no exported form yet; train with drafter.prefix_layer=false"
    if source.options["layers"] > 2:
        blocks = source.options["layers"]
        return f"its heads have {blocks} blocks, but the authors' code repeats the second one; train with drafter.layers=2"
    return refuse_embedding(source)


def files(source: ExportSource) -> Files:
    """The authors' layout."""
    options = source.options
    config = {
        "hydra_num_heads": options["heads"],
        "hydra_num_layers": options["layers"],
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": source.target_name,
        "torch_dtype": source.dtype,
    }
    return Files(config, source.tensors, "hydra_lm_head.safetensors", facts={"heads of the drafter": options["heads"]})
