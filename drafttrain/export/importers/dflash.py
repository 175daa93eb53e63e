"""DFlash: the authors' (z-lab) layout, transformers' and speculators'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import TRAINED_FOR, Importer, layer_options, same_size
from drafttrain.export.layouts.dflash import TRANSFORMERS
from drafttrain.export.layouts.renames import Renames
from drafttrain.model.target import Target

SHIFTED = "sample_from_anchor"
INNER, TYPE = "transformer_layer_config", "speculators_model_type"


def _zlab(found: Foreign) -> bool:
    """speculators has a form of its own, with the same names."""
    named = found.has("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight")
    return named and TYPE not in found.config


def _transformers(found: Foreign) -> bool:
    return found.has("encoder.fc.weight", "encoder.output_norm_enc.weight")


def _speculators(found: Foreign) -> bool:
    return found.config.get(TYPE) == "dflash"


def _speculators_options(found: Foreign, target: Target) -> dict[str, Any]:
    return speculators_options(found, target)


def speculators_options(found: Foreign, target: Target, shifted: bool = False) -> dict[str, Any]:
    """The numbers of the layers are k: those of the blocks whose inputs are read. shifted: what an unsaid convention is."""
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
    return _block(found, inner, target) | {
        "layers": found.number("num_hidden_layers", INNER),
        "taps": [k - 1 for k in layers],
        "mask_token": int(found.field("mask_token_id")),
        "slots": "shifted" if found.config.get(SHIFTED, shifted) else "in_place",
    }


def _zlab_options(found: Foreign, target: Target) -> dict[str, Any]:
    return _options(found, target, "dflash_config")


def _options(found: Foreign, target: Target, *inside: str) -> dict[str, Any]:
    """The numbers of the layers are k - 1 in both: those of the blocks whose outputs are read."""
    config, blocks = found.config, target.shape.blocks
    same_size(found, "num_target_layers", config.get("num_target_layers"), blocks)
    taps = found.field("target_layer_ids", *inside)
    if not isinstance(taps, list) or not all(isinstance(b, int) and 0 <= b < blocks for b in taps):
        raise UserError(
            f"{found.origin}: target_layer_ids is {taps!r}, this target has blocks 0 to {blocks - 1}; {TRAINED_FOR}"
        )
    shifted = config.get(SHIFTED, (config.get("dflash_config") or {}).get(SHIFTED, False))
    return _block(found, config, target) | {
        "layers": found.number("num_hidden_layers"),
        "taps": taps,
        "mask_token": int(found.field("mask_token_id", *inside)),
        "slots": "shifted" if shifted else "in_place",
    }


def _block(found: Foreign, layers: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """What all say alike. layers: the fields of the drafter's own layers."""
    kinds = layers.get("layer_types") or ["full_attention"]
    sliding = set(kinds) != {"full_attention"} or bool(layers.get("use_sliding_window", False))
    found.wants("attention", "sliding" if sliding else "full", ("full",), "and layers here see all of the context")
    return {"block_size": found.number("block_size"), "layer": layer_options(found, layers, target, "qwen3")}


def _names(found: Foreign) -> Renames:
    return TRANSFORMERS


ROWS = [
    Importer("z-lab", "dflash", _zlab, _zlab_options),
    Importer("speculators", "dflash", _speculators, _speculators_options),
    Importer("muse_glimmer_assistant", "dflash", _transformers, _options, _names),
]
