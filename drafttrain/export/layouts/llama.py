"""Fields and refusals that all layouts with decoder layers share."""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import ExportSource
from drafttrain.model.shapes import LayerShape, TargetShape

ENGINES = ("vllm", "sglang", "trtllm", "lmdeploy")  # stacks that rotate by code of their own; others by transformers'
ENGINE_SCALINGS = ("default", "linear", "llama3", "yarn")
YARN_UNREAD = {"attention_factor", "mscale", "mscale_all_dim", "truncate"}


def refuse_last_block(source: ExportSource, takes_it: tuple[str, ...]) -> str | None:
    """Why a drafter that taps the target's last block cannot be exported. takes_it: stacks that do give out its output."""
    blocks = source.shape.blocks
    if max(source.layer_inputs) < blocks or source.stack in takes_it:
        return None
    return (
        f"it taps the target's last block, and {source.stack} is known to capture only the inputs of blocks; "
        f"train with drafter.taps below {blocks - 1}"
    )


def refuse_windows(source: ExportSource, takes_them: tuple[str, ...] = ()) -> str | None:
    """Why a drafter with sliding windows cannot be exported. takes_them: stacks that read windows of this family."""
    if not windows_of(source.layer_shape, 1) or source.stack in takes_them:
        return None
    return (
        f"its layers have sliding windows, which {source.stack} is not known to read for this family; train without "
        "drafter.layer.sliding_window"
    )


def refuse_scaling(source: ExportSource) -> str | None:
    """Why a drafter with scaled rotary positions cannot be exported: engines with rotations of their own know some kinds.

    Of yarn they read its factor, its original context and its bounds.
    """
    shape = source.layer_shape
    scaling = (shape.rope_scaling if isinstance(shape, LayerShape) else None) or {}
    kind, given = str(scaling.get("rope_type", "default")), {key for key, value in scaling.items() if value is not None}
    if source.stack not in ENGINES or (kind in ENGINE_SCALINGS and not given & YARN_UNREAD):
        return None
    unread = f" with {', '.join(sorted(given & YARN_UNREAD))}" if kind in ENGINE_SCALINGS else ""
    return (
        f"its layers have rotary scaling of the type {kind}{unread}, which {source.stack} is not known to compute as "
        "transformers does; train without drafter.layer.rope_scaling, or leave out export.rope_scaling"
    )


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
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"layer_types": kinds, "sliding_window": max(filter(None, windows)), "use_sliding_window": True}


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
