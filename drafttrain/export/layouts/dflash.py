"""DFlash: the authors' (z-lab) layout, which all serving stacks read, and transformers'."""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import Files, Source
from drafttrain.export.layouts.llama import llama_fields
from drafttrain.export.layouts.renames import Renames

TRANSFORMERS = Renames(
    {"fc.{rest}": "encoder.fc.{rest}", "hidden_norm.{rest}": "encoder.output_norm_enc.{rest}", "{rest}": "{rest}"}
)


def refuse(source: Source) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    if source.options["slots"] != "in_place":
        return "its slots are shifted, loaders of this family read them in place; train with drafter.slots=in_place"
    if max(source.layer_inputs) == source.shape.blocks and source.stack != "vllm":
        return (
            f"it taps the target's last block, and {source.stack} is known to capture the inputs of blocks alone; "
            f"train with drafter.taps below {source.shape.blocks - 1}"
        )
    return None


def zlab(source: Source) -> Files:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_fields(source),
        "num_target_layers": source.shape.blocks,
        "dflash_config": {"mask_token_id": _mask(source), "target_layer_ids": _ids(source)},
    }
    return Files(config, source.tensors, facts=_facts(source))


def transformers(source: Source) -> Files:
    config = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **_fields(source),
        "mask_token_id": _mask(source),
        "target_layer_ids": _ids(source),
    }
    return Files(config, source.named(TRANSFORMERS), facts=_facts(source))


def _fields(source: Source) -> dict[str, Any]:
    layers = source.options["layers"]
    return {
        **llama_fields(source.layer_shape, layers, source.dtype),
        "block_size": source.options["block_size"],
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
    }


def _ids(source: Source) -> list[int]:
    return [k - 1 for k in source.layer_inputs]


def _mask(source: Source) -> int:
    mask = source.options["mask_token"]
    return source.shape.vocab_size - 1 if mask is None else int(mask)


def _facts(source: Source) -> dict[str, Any]:
    return {"block size": source.options["block_size"], "mask token": _mask(source)}
