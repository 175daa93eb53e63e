"""Hydra: the authors' layout with grounded heads. Our drafter's tensors already have its names.

Other kinds of heads, and a layer before them, are refused.
"""

from __future__ import annotations

from typing import Any

from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.format import Format, Importer, Rows, StackRow
from drafttrain.export.target_ends import EMBEDDING, refuse_embedding, same_size
from drafttrain.model.target import Target

WEIGHTS = "hydra_lm_head.safetensors"
# names of files are quoted
CODE = (
    "weights = safetensors.torch.load_file({safe!r})\n"
    "torch.save(weights, {pickle!r})\n"
    "HydraModel.from_pretrained({directory!r}, base_model={target!r})"
)
NOTE = "The authors' code reads a pickle. The first two lines write it from the safetensors file."


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
    return Files(config, source.tensors, WEIGHTS)


def facts(source: ExportSource) -> dict[str, Any]:
    """The settings that a drafter must have again when it is read back."""
    return {"heads of the drafter": source.options["heads"]}


def _options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    config = checkpoint.config
    checkpoint.wants("hydra_head_arch", config.get("hydra_head_arch", "mlp"), ("mlp",), "which is not supported here")
    checkpoint.wants(
        "grounded_heads", config.get("grounded_heads", True), (True,), "but heads here read the tokens before them"
    )
    checkpoint.wants("hidden_state_offset", config.get("hidden_state_offset", 0), (0,), "but heads here read the last state")
    same_size(checkpoint, "hidden size", config.get("hidden_size"), target.shape.hidden_size)
    same_size(checkpoint, "vocabulary", config.get("vocab_size"), target.shape.vocab_size)
    heads, layers = checkpoint.number("hydra_num_heads"), checkpoint.number("hydra_num_layers")
    return {"heads": heads, "layers": layers, "prefix_layer": False}


COPIES = {"input_embed_fn.weight": EMBEDDING}  # a tensor of the target, which the authors' training script saves too
IMPORTER = Importer("hydra_lm_head", "hydra", lambda f: f.has("hydra_mlp.0.0.linear.weight"), _options, shared=COPIES)
IMPORTERS = [IMPORTER]
ROWS: Rows = {"hydra": {"official": StackRow(Format(IMPORTER.name, files, IMPORTER, refuse, facts), CODE, note=NOTE)}}
