"""EAGLE-1 and 2, of vLLM, SGLang and the authors: one layer behind `fc`, without an input norm."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import EMBEDDING, HEAD, Draft, Importer, layer_options
from drafttrain.model.target import Target

ATTENTION = "layers.0.self_attn.q_proj.weight"


def _knows(found: Foreign) -> bool:
    return found.has("fc.weight", ATTENTION) and not any("hidden_norm" in name for name in found.kinds)


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    """The tensor says whether there is a bias: its zeros are none, and `bias` in config.json is false for SGLang's sake too."""
    found.wants(
        "num_hidden_layers", found.config.get("num_hidden_layers", 1), (1,), "and drafters of this family have one layer"
    )
    own = found.has("fc.bias") and bool(found.tensors["fc.bias"].any())
    return {"bias": own or found.config.get("bias") is True, "layer": layer_options(found, found.config, target)}


def _mend(draft: Draft) -> None:
    if not draft.options["bias"]:
        draft.tensors.pop("fc.bias", None)
    elif draft.found.config.get("bias") is False:
        draft.notes.append("config.json says bias false, and fc.bias is not zero: it is used, as by SGLang; vLLM leaves it out")


ROWS = [
    Importer(
        "EAGLE-1",
        "eagle",
        _knows,
        _options,
        shared={"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD},
        mend=_mend,
    )
]
