"""P-EAGLE: the portable layout with a mask state, and that of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.importers import eagle3
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Draft, Importer, layer_options, same_size
from drafttrain.export.layouts.peagle import MASK, RENAMES
from drafttrain.export.layouts.renames import Renames
from drafttrain.model.target import Target

EMBEDDING = "embed_tokens.weight"
MASKS = (MASK, "ptd_token_id", "mask_token_id")  # where stacks look for it
LAYERS = Renames({"mask.hidden": "mask_hidden", "layers.0.{rest}": "midlayer.{rest}", "{rest}": "{rest}"})


def _portable(found: Foreign) -> bool:
    return found.has("fc.weight", "mask_hidden") and eagle3.TYPE not in found.config


def _speculators(found: Foreign) -> bool:
    return found.config.get(eagle3.TYPE) == "peagle"


def _renames(found: Foreign) -> Renames:
    return LAYERS if found.has("midlayer.hidden_norm.weight") else RENAMES


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    config = found.config
    inside = (eagle3.INNER,) if eagle3.TYPE in config else ()
    inner = found.field(eagle3.INNER) if inside else config
    same_size(found, "target_hidden_size", config.get("target_hidden_size"), target.shape.hidden_size)
    found.wants("norm_before_fc", config.get("norm_before_fc", False), (False,), "which drafters here have not")
    taps = eagle3.layer_inputs(found, target.shape.blocks)
    same_size(found, "num_aux_hidden_states", config.get("num_aux_hidden_states"), len(taps))
    return {
        "layers": found.number("num_hidden_layers", *inside),
        "taps": [k - 1 for k in taps],
        "mask_token": _mask(found),
        "draft_vocab": eagle3.spoken(found, target.shape.vocab_size),
        "fc_norm": bool(config.get("fc_norm", found.has("fc_norm.0.weight"))),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "layer": layer_options(found, inner, target),
    }


def _mask(found: Foreign) -> int:
    said = {key: found.config[key] for key in MASKS if found.config.get(key) is not None}
    if len(set(said.values())) != 1 or not all(isinstance(x, int) and not isinstance(x, bool) for x in said.values()):
        got = ", ".join(f"{key} {value!r}" for key, value in said.items()) or "none"
        raise UserError(f"{found.origin}: one mask token is needed, as {' or '.join(MASKS)}; config.json has {got}: correct it")
    return next(iter(said.values()))


def _mend(draft: Draft) -> None:
    eagle3.mend(draft)
    draft.tensors["mask.hidden"] = draft.tensors["mask.hidden"].reshape(1, 1, -1)


def _complete(draft: Draft, own: Mapping[str, Tensor]) -> None:
    """Where it has no embedding of its own it reads the target's, as stacks do."""
    if EMBEDDING not in draft.tensors:
        draft.notes.append("it has no embedding of its own: the target's is taken")
        draft.tensors[EMBEDDING] = own[EMBEDDING]


ROWS = [
    Importer("portable", "peagle", _portable, _options, _renames, mend=_mend, complete=_complete),
    Importer("speculators", "peagle", _speculators, _options, _renames, mend=_mend, complete=_complete),
]
