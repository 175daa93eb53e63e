"""DFlash: the layouts of the authors (z-lab), of transformers and of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import INNER, TRAINED_FOR, TYPE, Importer, layer_options, same_size, speculators
from drafttrain.export.layouts.dflash import TRANSFORMERS
from drafttrain.model.target import Target

SHIFTED = "sample_from_anchor"
NONE: Mapping[str, Any] = {}
PLAIN = ("fc", "hidden_norm", "norm", "layers", "embed_tokens", "lm_head")  # first parts of tensors' names


def _zlab(found: Foreign) -> bool:
    """speculators has its own layout with the same tensor names; other families have a head too."""
    named = found.has("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight")
    return named and TYPE not in found.config and all(name.split(".")[0] in PLAIN for name in found.kinds)


def _transformers(found: Foreign) -> bool:
    return found.has("encoder.fc.weight", "encoder.output_norm_enc.weight")


def speculators_options(found: Foreign, target: Target, shifted: bool = False, non_causal: bool = False) -> dict[str, Any]:
    """Options from speculators' configuration. Its layer ids are k, blocks whose inputs are read. shifted: the default
    convention. non_causal: the default for slots of layers with windows.
    """
    inner, blocks = found.field(INNER), target.shape.blocks
    if not isinstance(inner, Mapping):
        raise UserError(f"{found.origin}: {INNER} is {inner!r}; an object is needed")
    same_size(found, "target_hidden_size", found.config.get("target_hidden_size"), target.shape.hidden_size)
    same_size(found, "draft_vocab_size", found.config.get("draft_vocab_size"), target.shape.vocab_size)
    layers = found.field("aux_hidden_state_layer_ids")
    if not isinstance(layers, list) or not all(isinstance(k, int) and 1 <= k <= blocks for k in layers):
        raise UserError(
            f"{found.origin}: aux_hidden_state_layer_ids is {layers!r}; of a target of {blocks} blocks, 1 to {blocks} can be "
            f"read; {TRAINED_FOR}"
        )
    non_causal = bool(found.config.get("sliding_window_non_causal", non_causal))
    return _block(found, inner, target, causal_windows=not non_causal) | {
        "layers": found.number("num_hidden_layers", INNER),
        "taps": [k - 1 for k in layers],
        "mask_token": int(found.field("mask_token_id")),
        "slots": "shifted" if found.config.get(SHIFTED, shifted) else "in_place",
    }


def zlab_options(found: Foreign, target: Target) -> dict[str, Any]:
    """`is_causal`, in old files inside dflash_config, is of all layers; without it those with windows are causal."""
    inside = found.config.get("dflash_config") or {}
    given = found.config.get("is_causal", inside.get("causal") if isinstance(inside, Mapping) else None)
    return _options(found, target, "dflash_config", causal_windows=given in (None, True), causal=given is True)


def _transformers_options(found: Foreign, target: Target) -> dict[str, Any]:
    """No layer is causal. The window counts the positions to either side, and all layers have one of 2048 by default."""
    window, layers = found.config.get("sliding_window", 2048), found.number("num_hidden_layers")
    kinds = found.config.get("layer_types") or ["sliding_attention"] * layers
    more = {"sliding_window": window + 1 if isinstance(window, int) else window, "layer_types": kinds}
    return _options(found, target, causal_windows=False, more=more)


def _options(
    found: Foreign,
    target: Target,
    *inside: str,
    causal_windows: bool,
    causal: bool = False,
    more: Mapping[str, Any] = NONE,
) -> dict[str, Any]:
    """Options from the authors' or transformers' configuration. Their layer ids are k - 1, blocks whose outputs are read.

    causal_windows, causal: as for `_block`. more: fields in place of the configuration's.
    """
    config, blocks = found.config, target.shape.blocks
    same_size(found, "num_target_layers", config.get("num_target_layers"), blocks)
    taps = found.field("target_layer_ids", *inside)
    if not isinstance(taps, list) or not all(isinstance(b, int) and 0 <= b < blocks for b in taps):
        raise UserError(
            f"{found.origin}: target_layer_ids is {taps!r}, this target has blocks 0 to {blocks - 1}; {TRAINED_FOR}"
        )
    shifted = config.get(SHIFTED, (config.get("dflash_config") or {}).get(SHIFTED, False))
    return _block(found, {**config, **more}, target, causal_windows, causal) | {
        "layers": found.number("num_hidden_layers"),
        "taps": taps,
        "mask_token": int(found.field("mask_token_id", *inside)),
        "slots": "shifted" if shifted else "in_place",
    }


def _block(
    found: Foreign, layers: Mapping[str, Any], target: Target, causal_windows: bool, causal: bool = False
) -> dict[str, Any]:
    """The options that all layouts give alike. layers: the fields of the drafter's own layers.

    causal_windows: in layers with windows slots see no later slot. causal: in all layers.
    """
    own = layer_options(found, layers, target, "qwen3")
    if causal and (own["sliding_window"] is None or own["full_attention_layers"]):
        raise UserError(
            f"{found.origin}: its blocks are causal in all layers, but layers without a window here see their whole block; "
            "drafters with windows in all layers, or without that flag, can be imported"
        )
    windows = {} if own["sliding_window"] is None else {"causal_windows": causal_windows}
    return {"block_size": found.number("block_size"), "layer": own, **windows}


ROWS = [
    Importer("z-lab", "dflash", _zlab, zlab_options),
    Importer("speculators", "dflash", speculators("dflash"), speculators_options),
    Importer("muse_glimmer_assistant", "dflash", _transformers, _transformers_options, TRANSFORMERS),
]
