"""Fields of decoder layers, which many formats have: written, read into `LayerOptions`, and refused for some stacks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

from drafttrain.core.errors import ParityError, UserError
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import NOTHING, ExportSource, Reads
from drafttrain.export.speculators import INNER
from drafttrain.export.target_ends import same_size
from drafttrain.model.shapes import (
    CONTEXT,
    LATENT_FIELDS,
    LayerOptions,
    LayerShape,
    TargetShape,
    check_scaling,
    scaling_fields,
)
from drafttrain.model.target import Target
from drafttrain.targets.structure import shape_of

ENGINE_SCALINGS = ("default", "linear", "llama3", "yarn")  # that engines with rotations of their own know
YARN_UNREAD = {"attention_factor", "mscale", "mscale_all_dim", "truncate"}
NAMED = {  # fields by the names of their settings
    "vocabulary": "vocab_size",
    "rope": "rope_theta",
    "norm": "rms_norm_eps",
    "head_dim": "head_dim",
    "heads": "num_key_value_heads",
    "max positions": "max_position_embeddings",
}
KINDS = (["full_attention"], ["sliding_attention"], ["full_attention", "sliding_attention"])
ROPE = ("rope_type", "type", "rope_theta")  # fields of every rotation
MROPE = ("mrope_section", "mrope_interleaved")  # of pictures; texts are rotated as without
LATENT = "deepseek_v3"  # the kind of layers with latent attention
DEFAULTS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config, LATENT: DeepseekV3Config}  # of layers, by their kind


def refuse_last_block(source: ExportSource, reads: Reads = NOTHING) -> str | None:
    """Why a drafter that taps the target's last block cannot be exported; None where the stack gives out its output."""
    blocks = source.shape.blocks
    if max(source.layer_inputs) < blocks or "last block" in reads:
        return None
    return (
        f"it taps the target's last block, and {source.stack} is known to capture only the inputs of blocks; "
        f"train with drafter.target_layer_ids below {blocks - 1}"
    )


def refuse_windows(source: ExportSource, reads: Reads = NOTHING) -> str | None:
    """Why a drafter with sliding windows cannot be exported; None where the stack reads them for this family."""
    if not windows_of(source.layer_shape, 1) or "windows" in reads:
        return None
    return (
        f"its layers have sliding windows, which {source.stack} is not known to read for this family; train without "
        "drafter.layer.sliding_window"
    )


def refuse_scaling(source: ExportSource) -> str | None:
    """Why a drafter with scaled rotary positions cannot be exported: engines with rotations of their own know some kinds.

    Of yarn they read its factor, its original context and its bounds; in latent attention all that these layers may have
    (`check_latent_scaling`).
    """
    shape = source.layer_shape
    if latent_fields(shape):
        return None
    scaling = (shape.rope_scaling if isinstance(shape, LayerShape) else None) or {}
    rope_type, scaling_keys = (
        str(scaling.get("rope_type", "default")),
        {key for key, value in scaling.items() if value is not None},
    )
    if rope_type in ENGINE_SCALINGS and not scaling_keys & YARN_UNREAD:
        return None
    unread = f" with {', '.join(sorted(scaling_keys & YARN_UNREAD))}" if rope_type in ENGINE_SCALINGS else ""
    return (
        f"its layers have rotary scaling of the type {rope_type}{unread}, which {source.stack} is not known to compute as "
        "transformers does; train without drafter.layer.rope_scaling, or leave out export.rope_scaling"
    )


def latent_fields(shape: TargetShape) -> dict[str, Any]:
    """The fields of layers with latent attention; empty for others."""
    fields = {name: getattr(shape, name, None) for name in LATENT_FIELDS}
    return {} if fields["kv_lora_rank"] is None else fields


def has_latents(checkpoint: ExternalCheckpoint) -> bool:
    """Whether layers have latent attention, by the tensors."""
    return any(name.endswith(".self_attn.kv_a_proj_with_mqa.weight") for name in checkpoint.kinds)


def windows_of(shape: TargetShape, layers: int) -> list[int | None]:
    """Each layer's sliding window, None for one that sees all positions; empty without drafter.layer.sliding_window."""
    if not isinstance(shape, LayerShape) or shape.sliding_window is None:
        return []
    return [shape.window(i) for i in range(layers)]


def window_fields(shape: TargetShape, layers: int) -> dict[str, Any]:
    """The fields of layers with sliding windows; none where every layer sees all positions."""
    windows = windows_of(shape, layers)
    if not any(windows):
        return {}
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"layer_types": layer_types, "sliding_window": max(filter(None, windows)), "use_sliding_window": True}


def llama_fields(shape: TargetShape, layers: int, dtype: str) -> dict[str, Any]:
    """The layers' fields. Every one is written, because stacks have different defaults.

    rope_scaling is the drafter's own, which may differ from the target's.
    """
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling if isinstance(shape, LayerShape) else None,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def written_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the fields of `llama_fields` say in a written configuration, in the terms of `golden.facts_of`.

    Raises ParityError for a field that is missing, because stacks would take defaults of their own.
    """
    layer_config = config.get(INNER, config)
    for name, key in NAMED.items():
        if layer_config.get(key) is None:
            raise ParityError(name, f"the configuration does not say {key}, for which stacks have defaults of their own")
    heads = [layer_config["num_attention_heads"], layer_config["num_key_value_heads"]]
    return {name: layer_config[key] for name, key in NAMED.items() if name != "heads"} | {"heads": heads}


def usual_layers() -> Mapping[str, Any]:
    """What transformers' Llama and Qwen3 take for fields that are missing."""
    return LlamaConfig().to_dict() | Qwen3Config().to_dict()


def layer_options(found: ExternalCheckpoint, fields: Mapping[str, Any], target: Target, kind: str = "llama") -> dict[str, Any]:
    """`LayerOptions` as plain data: where the described layers are not shaped like the target's.

    Missing fields get transformers' defaults for this kind of layers, as in serving stacks.
    """
    same_size(found, "hidden size", fields.get("hidden_size"), target.shape.hidden_size)
    same_size(found, "vocabulary", fields.get("vocab_size"), target.shape.vocab_size)
    found.wants("hidden_act", fields.get("hidden_act"), (None, "silu", "swish"), "but drafter layers are gated by SiLU")
    _check_rope(found, fields)
    shape_keys = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    rope_keys = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    config_fields = {key: fields[key] for key in shape_keys + rope_keys if fields.get(key) is not None}
    latent = _latent(found, fields) if kind == LATENT else {}
    try:
        # a copy, because it changes its arguments
        config = DEFAULTS[kind](hidden_size=target.shape.hidden_size, **copy.deepcopy(config_fields))
        shape = shape_of(config)
    except Exception as error:  # its validation raises many kinds
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{found.origin}: {found.config_name} describes no decoder layer ({reason}); correct it") from error
    layer_shape = replace(_scaled(found, shape, config, target.shape.max_positions), **_windows(found, fields))
    if latent:
        layer_shape = replace(layer_shape, kv_heads=shape.heads, head_dim=latent["qk_rope_head_dim"], **latent)
    return asdict(LayerOptions.between(layer_shape, target.shape))


def _latent(checkpoint: ExternalCheckpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The ranks and widths of latent attention, which engines have no defaults for. Their rotary pairs are neighbours."""
    interleave = fields.get("rope_interleave")
    checkpoint.wants("rope_interleave", interleave, (None, True), "but layers with latent attention rotate neighbouring values")
    widths = {name: checkpoint.number(name) for name in LATENT_FIELDS if name != "q_lora_rank"}
    return widths | {"q_lora_rank": None if fields.get("q_lora_rank") is None else checkpoint.number("q_lora_rank")}


def _check_rope(checkpoint: ExternalCheckpoint, fields: Mapping[str, Any]) -> None:
    """Raise UserError for rotations that drafters' layers do not have. Transformers 5 writes them into `rope_parameters`."""
    for section in (fields, fields.get("rope_parameters"), fields.get("rope_scaling")):
        rotary_factor = (
            section.get("partial_rotary_factor") if isinstance(section, Mapping) and not _proportional(section) else None
        )
        checkpoint.wants("partial_rotary_factor", rotary_factor, (None, 1.0), "but drafter layers rotate whole heads")
    for key in ("is_neox_style", "rope_is_neox_style"):
        checkpoint.wants(key, fields.get(key), (None, True), "but drafter layers rotate the two halves of a head")
    rope = fields.get("rope_parameters")
    if isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"{checkpoint.origin}: rope_parameters differ by kind of layer; drafter layers have the same rotation")


def _proportional(rope: Mapping[str, Any]) -> bool:
    """Whether a rotation leaves the last pairs of a head as they are: its other fields have another sense."""
    return "proportional" in (rope.get("rope_type"), rope.get("type"))


def _windows(checkpoint: ExternalCheckpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding windows of `LayerShape`. A window that no layer has is ignored: targets' fields are often copied.

    So are kinds of further layers, as engines look up those of the layers that there are.
    """
    layers, use_sliding_window = fields.get("num_hidden_layers", 1), fields.get("use_sliding_window")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise UserError(f"{checkpoint.origin}: num_hidden_layers is {layers!r}; a number is needed")
    layer_types = fields.get("layer_types") or ["sliding_attention" if use_sliding_window else "full_attention"] * layers
    if not isinstance(layer_types, list) or not all(isinstance(layer_type, str) for layer_type in layer_types):
        raise UserError(f"{checkpoint.origin}: layer_types is {layer_types!r}; a list of names is needed")
    layer_types = layer_types[:layers]
    checkpoint.wants("layer_types", sorted(set(layer_types)), KINDS, "but layers of drafters see all positions or a window")
    if len(layer_types) < layers:
        raise UserError(
            f"{checkpoint.origin}: layer_types names {len(layer_types)} layers, num_hidden_layers is {layers}; correct one"
        )
    if "sliding_attention" not in layer_types:
        return {}
    checkpoint.wants("use_sliding_window", use_sliding_window, (None, True), "but layer_types has layers with a window")
    window = fields.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool):
        raise UserError(f"{checkpoint.origin}: sliding_window is {window!r}, and layers have windows; a number is needed")
    full_attention_layers = tuple(i for i, layer_type in enumerate(layer_types) if layer_type == "full_attention")
    return {"sliding_window": window, "full_attention_layers": full_attention_layers}


def _scaled(checkpoint: ExternalCheckpoint, shape: Any, config: Any, positions: int) -> LayerShape:
    """The layers' dimensions with their rotary scaling. positions: of the target."""
    rope = {key: value for key, value in config.rope_parameters.items() if value is not None}
    rope_type, max_positions = str(rope.get("rope_type", "default")), config.max_position_embeddings
    scaling = {"rope_type": rope_type} | {
        key: value for key, value in rope.items() if key not in (*ROPE, *_unread_rope(rope_type))
    }
    if rope_type == "longrope":  # transformers takes the ratio of the contexts for a factor that is missing
        scaling.setdefault("factor", max_positions / scaling[CONTEXT])
    if rope_type == "dynamic" and max_positions < positions:
        raise UserError(
            f"{checkpoint.origin}: its positions are scaled dynamically beyond {max_positions}, this target has {positions}; "
            "drafter layers rotate all texts alike"
        )
    try:
        check_scaling(scaling, shape.head_dim)
    except UserError as error:
        raise UserError(f"{checkpoint.origin}: {error}") from error
    return LayerShape(**asdict(shape), rope_scaling=None if rope_type == "default" else scaling)


def _unread_rope(rope_type: str) -> tuple[str, ...]:
    """Fields that transformers does not read in this kind of scaling."""
    rotary_keys = () if rope_type == "proportional" else ("partial_rotary_factor",)  # 1, as `_check_rope` found
    return (
        *rotary_keys,
        *(() if CONTEXT in scaling_fields(rope_type) else (CONTEXT,)),
        *(MROPE if rope_type == "default" else ()),
    )
