"""EAGLE-1 and 2, in the layouts of vLLM, SGLang and the authors: `fc`, then one layer without an input norm."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import EMBEDDING, HEAD, ConvertedDrafter, Importer, layer_options
from drafttrain.model.target import Target

ATTENTION = "layers.0.self_attn.q_proj.weight"


def _knows(found: Foreign) -> bool:
    return found.has("fc.weight", ATTENTION) and not any("hidden_norm" in name for name in found.kinds)


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    """The tensor decides about the bias: zeros count as none, because `bias` in config.json is false for SGLang too."""
    found.wants(
        "num_hidden_layers", found.config.get("num_hidden_layers", 1), (1,), "but drafters of this family have one layer"
    )
    own = found.has("fc.bias") and bool(found.tensors["fc.bias"].any())
    return {"bias": own or found.config.get("bias") is True, "layer": layer_options(found, found.config, target)}


def _mend(draft: ConvertedDrafter) -> None:
    if not draft.options["bias"]:
        draft.tensors.pop("fc.bias", None)
    elif draft.found.config.get("bias") is False:
        draft.notes.append("config.json says bias false, but fc.bias is not zero: it is used, as in SGLang; vLLM ignores it")


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
