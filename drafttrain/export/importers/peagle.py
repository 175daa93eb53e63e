"""P-EAGLE: the portable layout with a mask state, and the layout of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.importers import eagle3
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import INNER, TYPE, ConvertedDrafter, Importer, speculators
from drafttrain.export.layouts.peagle import MASK, RENAMES
from drafttrain.export.layouts.renames import Renames
from drafttrain.model.target import Target

EMBEDDING = "embed_tokens.weight"
MASKS = (MASK, "ptd_token_id", "mask_token_id")  # keys that stacks look for
LAYERS = Renames({"mask.hidden": "mask_hidden", "layers.0.{rest}": "midlayer.{rest}", "{rest}": "{rest}"})


def _portable(found: Foreign) -> bool:
    return found.has("fc.weight", "mask_hidden") and TYPE not in found.config


def _renames(found: Foreign) -> Renames:
    return LAYERS if found.has("midlayer.hidden_norm.weight") else RENAMES


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    inside = (INNER,) if TYPE in found.config else ()
    inner = found.object(INNER) if inside else found.config
    own = {"layers": found.number("num_hidden_layers", *inside), "mask_token": _mask(found)}
    own |= eagle3.shared_options(found, inner, target)
    found.wants("norm_output", eagle3.norm_output(found), (False,), "but drafters of this family draft in one pass")
    return own


def _mask(found: Foreign) -> int:
    masks = {key: found.config[key] for key in MASKS if found.config.get(key) is not None}
    if not all(isinstance(x, int) and not isinstance(x, bool) for x in masks.values()) or len(set(masks.values())) != 1:
        got = ", ".join(f"{key} {value!r}" for key, value in masks.items()) or "none"
        raise UserError(f"{found.origin}: one mask token is needed, as {' or '.join(MASKS)}; config.json has {got}: correct it")
    return next(iter(masks.values()))


def _mend(draft: ConvertedDrafter) -> None:
    eagle3.mend(draft)
    draft.tensors["mask.hidden"] = draft.tensors["mask.hidden"].reshape(1, 1, -1)


def _complete(draft: ConvertedDrafter, own: Mapping[str, Tensor]) -> None:
    """Use the target's embedding if the drafter has none, as stacks do."""
    if EMBEDDING not in draft.tensors:
        draft.notes.append("it has no embedding: the target's is used")
        draft.tensors[EMBEDDING] = own[EMBEDDING]


ROWS = [
    Importer("portable", "peagle", _portable, _options, _renames, mend=_mend, complete=_complete),
    Importer("speculators", "peagle", speculators("peagle"), _options, _renames, mend=_mend, complete=_complete),
]
