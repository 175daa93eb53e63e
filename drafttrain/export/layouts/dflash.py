"""DFlash: the authors' (z-lab) layout, which most serving stacks read, and the layouts of transformers and speculators."""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import Files, Source
from drafttrain.export.layouts.llama import llama_fields, refuse_last_block
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.speculators import header

TRANSFORMERS = Renames(
    {"fc.{rest}": "encoder.fc.{rest}", "hidden_norm.{rest}": "encoder.output_norm_enc.{rest}", "{rest}": "{rest}"}
)


def refuse(source: Source) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    if source.options["slots"] != "in_place":
        return "its slots are shifted, but loaders of this family read them in place; train with drafter.slots=in_place"
    return refuse_last(source)


def refuse_last(source: Source) -> str | None:
    """Why a stack that accepts shifted slots cannot load this drafter; None where it can."""
    return refuse_last_block(source, ("vllm", "lmdeploy"))


def lmdeploy_refuse(source: Source) -> str | None:
    """Why LMDeploy cannot load this drafter. Of the targets known here it captures only Qwen3's states."""
    kind = source.opened.loaded.target.model.config.model_type
    if kind != "qwen3":
        return f"LMDeploy captures no states of {kind} targets for this family, only of qwen3"
    if source.layer_inputs != sorted(source.layer_inputs):
        return "its taps do not ascend, as LMDeploy requires; train with ascending drafter.taps"
    return refuse(source)


def lmdeploy(source: Source) -> Files:
    """The authors' layout, with the block size in `dflash_config`, as in their newer versions."""
    files = zlab(source)
    files.config["dflash_config"]["block_size"] = source.options["block_size"]
    return files


def zlab(source: Source) -> Files:
    """The authors' layout."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_fields(source),
        "num_target_layers": source.shape.blocks,
        "dflash_config": {"mask_token_id": mask_token(source), "target_layer_ids": _ids(source)},
    }
    return Files(config, source.tensors, facts=facts(source))


def transformers(source: Source) -> Files:
    """transformers' layout."""
    config = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **_fields(source),
        "mask_token_id": mask_token(source),
        "target_layer_ids": _ids(source),
    }
    return Files(config, source.named(TRANSFORMERS), facts=facts(source))


def speculators(source: Source) -> Files:
    """speculators' layout."""
    return Files(speculators_config(source, "dflash", "DFlashSpeculator"), source.tensors, facts=facts(source))


def speculators_config(source: Source, algorithm: str, architecture: str) -> dict[str, Any]:
    """Speculators' configuration. Its layer ids name the blocks that read the states, unlike the authors' ids."""
    layers = source.options["layers"]
    inner = {"model_type": "qwen3", **llama_fields(source.layer_shape, layers, source.dtype)}
    return {
        **header(source, algorithm, architecture),
        "transformer_layer_config": inner | {"layer_types": ["full_attention"] * layers, "use_sliding_window": False},
        "draft_vocab_size": source.shape.vocab_size,
        "target_hidden_size": source.shape.hidden_size,
        "block_size": source.options["block_size"],
        "mask_token_id": mask_token(source),
        "aux_hidden_state_layer_ids": source.layer_inputs,
        "sample_from_anchor": source.options["slots"] == "shifted",
        "sliding_window_non_causal": True,  # with false vLLM would treat the block as causal
    }


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


def mask_token(source: Source) -> int:
    """The mask token; by default the last token of the vocabulary."""
    mask = source.options["mask_token"]
    return source.shape.vocab_size - 1 if mask is None else int(mask)


def facts(source: Source) -> dict[str, Any]:
    """The facts that the reader must find in addition to the golden ones."""
    return {"block size": source.options["block_size"], "mask token": mask_token(source)}
