"""Hydra: the authors' layout with grounded heads. Other kinds of heads, and a layer before them, are refused."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer, same_size
from drafttrain.model.target import Target


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    config = found.config
    found.wants("hydra_head_arch", config.get("hydra_head_arch", "mlp"), ("mlp",), "which is not supported here")
    found.wants("grounded_heads", config.get("grounded_heads", True), (True,), "but heads here read the tokens before them")
    found.wants("hidden_state_offset", config.get("hidden_state_offset", 0), (0,), "but heads here read the last state")
    same_size(found, "hidden size", config.get("hidden_size"), target.shape.hidden_size)
    same_size(found, "vocabulary", config.get("vocab_size"), target.shape.vocab_size)
    heads, layers = found.number("hydra_num_heads"), found.number("hydra_num_layers")
    return {"heads": heads, "layers": layers, "prefix_layer": False}


ROWS = [Importer("hydra_lm_head", "hydra", lambda f: f.has("hydra_mlp.0.0.linear.weight"), _options)]
