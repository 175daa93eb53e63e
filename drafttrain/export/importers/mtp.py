"""MTP: one module under DeepSeek's names, or in speculators' layout."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import (
    INNER,
    NORM,
    TYPE,
    ConvertedDrafter,
    Importer,
    check_shared,
    layer_options,
    same_size,
    speculators,
)
from drafttrain.export.layouts import mtp
from drafttrain.export.layouts.renames import Renames
from drafttrain.model.target import Target

MODULES = "num_nextn_predict_layers"


def _deepseek(found: Foreign) -> bool:
    return any(name.endswith(".eh_proj.weight") for name in found.kinds)


def _deepseek_options(found: Foreign, target: Target) -> dict[str, Any]:
    found.wants(MODULES, found.config.get(MODULES), (1,), "but here one module drafts every depth")
    same_size(found, "number of blocks", found.number("num_hidden_layers"), target.shape.blocks)
    normed = any(name.endswith(".self_attn.q_norm.weight") for name in found.kinds)
    return {"norm_output": False, "qk_norm": normed, "layer": layer_options(found, found.config, target)}


def _speculators_options(found: Foreign, target: Target) -> dict[str, Any]:
    found.wants(MODULES, found.config.get(MODULES, 1), (1,), "but here one module drafts every depth")
    inner = found.object(INNER)
    found.wants(f"{INNER}'s model_type", inner.get("model_type"), ("qwen3",), "but only Qwen3's blocks are supported here")
    return {"norm_output": True, "qk_norm": True, "layer": layer_options(found, inner, target, "qwen3")}


def _deepseek_names(found: Foreign) -> Renames:
    return mtp.deepseek_names(found.number("num_hidden_layers"))


def _mend(draft: ConvertedDrafter) -> None:
    """Check that the norm before the head is the target's, and drop it."""
    names = mtp.SPECULATORS if TYPE in draft.found.config else _deepseek_names(draft.found)
    if draft.tensors.pop("norm.weight", None) is not None:
        check_shared(draft.found, str(names.theirs("norm.weight")), NORM, draft.target)


ROWS = [
    Importer("DeepSeek", "mtp", _deepseek, _deepseek_options, _deepseek_names, mend=_mend),
    Importer("speculators", "mtp", speculators("mtp"), _speculators_options, mtp.SPECULATORS, mend=_mend),
]
