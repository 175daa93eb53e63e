"""LiLiCorr: the layout of ModelOpt's exports, with the names of its older versions too."""

from __future__ import annotations

from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.block_fields import NESTED, field_of
from drafttrain.export.importers.dflash import COPIES, zlab_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import TYPE, Importer
from drafttrain.export.layouts.lilicorr import ATTENTION, FIELDS, RENAMES
from drafttrain.export.layouts.renames import Renames
from drafttrain.model.target import Target

REALS = ("mlp_ratio", "logit_scale", "vector_eps")  # options that need not be whole numbers
NUMBERED = Renames(  # names of older exports
    ATTENTION
    | {
        "lilicorr.feature_norm.{part}": "lilicorr.feature_mlp.0.{part}",
        "lilicorr.feature_mlp.up_proj.{part}": "lilicorr.feature_mlp.1.{part}",
        "lilicorr.feature_mlp.down_proj.{part}": "lilicorr.feature_mlp.3.{part}",
        "lilicorr.layers.{i}.mlp.up_proj.{part}": "lilicorr.layers.{i}.mlp.0.{part}",
        "lilicorr.layers.{i}.mlp.down_proj.{part}": "lilicorr.layers.{i}.mlp.2.{part}",
        "{rest}": "{rest}",
    }
)


def _knows(found: Foreign) -> bool:
    return found.has("lilicorr.out_head.weight", "lilicorr.anchor_out_head.weight") and TYPE not in found.config


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    """Width 0 is the target's."""
    taps = field_of(found, "conv_kernel_size")
    found.wants("conv_kernel_size", taps, (None, 0), "but layers of this family have no convolutions here")
    own: dict[str, Any] = {}
    for theirs, ours in FIELDS.items():
        if ours in REALS:
            own[ours] = _real(found, theirs)
        elif ours == "hidden_size" and found.field(theirs, NESTED) == 0:
            own[ours] = target.shape.hidden_size
        else:
            own[ours] = found.number(theirs, NESTED)
    return zlab_options(found, target) | own


def _real(found: Foreign, key: str) -> float:
    value = found.field(key, NESTED)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{found.origin}: {key} is {value!r}; a number is needed")
    return float(value)


def _renames(found: Foreign) -> Renames:
    return NUMBERED if found.has("lilicorr.feature_mlp.0.weight") else RENAMES


ROWS = [Importer("LiLiCorr", "lilicorr", _knows, _options, _renames, COPIES)]
