"""DFlash: the authors' (z-lab) layout and transformers'."""

from __future__ import annotations

from typing import Any

from drafttrain.errors import UserError
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import TRAINED_FOR, Importer, layer_options, same_size
from drafttrain.export.layouts.dflash import TRANSFORMERS
from drafttrain.export.layouts.renames import Renames
from drafttrain.target import Target

SHIFTED = "sample_from_anchor"


def _zlab(found: Foreign) -> bool:
    """speculators has a form of its own, with the same names."""
    named = found.has("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight")
    return named and "speculators_model_type" not in found.config


def _transformers(found: Foreign) -> bool:
    return found.has("encoder.fc.weight", "encoder.output_norm_enc.weight")


def _zlab_options(found: Foreign, target: Target) -> dict[str, Any]:
    return _options(found, target, "dflash_config")


def _options(found: Foreign, target: Target, *inside: str) -> dict[str, Any]:
    """The numbers of the layers are k - 1 in both: those of the blocks whose outputs are read."""
    config, layers, blocks = found.config, found.number("num_hidden_layers"), target.shape.blocks
    same_size(found, "num_target_layers", config.get("num_target_layers"), blocks)
    kinds = config.get("layer_types") or ["full_attention"]
    sliding = set(kinds) != {"full_attention"} or bool(config.get("use_sliding_window", False))
    found.wants("attention", "sliding" if sliding else "full", ("full",), "and layers here see all of the context")
    taps = found.field("target_layer_ids", *inside)
    if not isinstance(taps, list) or not all(isinstance(b, int) and 0 <= b < blocks for b in taps):
        raise UserError(
            f"{found.origin}: target_layer_ids is {taps!r}, this target has blocks 0 to {blocks - 1}; {TRAINED_FOR}"
        )
    shifted = config.get(SHIFTED, (config.get("dflash_config") or {}).get(SHIFTED, False))
    return {
        "block_size": found.number("block_size"),
        "layers": layers,
        "taps": taps,
        "mask_token": int(found.field("mask_token_id", *inside)),
        "slots": "shifted" if shifted else "in_place",
        "layer": layer_options(found, config, target, "qwen3"),
    }


def _names(found: Foreign) -> Renames:
    return TRANSFORMERS


ROWS = [
    Importer("z-lab", "dflash", _zlab, _zlab_options),
    Importer("muse_glimmer_assistant", "dflash", _transformers, _options, _names),
]
