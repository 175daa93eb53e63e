"""Domino: SGLang's layout, which its trainers write too."""

from __future__ import annotations

from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.block_fields import NESTED, field_of, number_of
from drafttrain.export.importers.dflash import COPIES, zlab_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import TYPE, Importer
from drafttrain.export.layouts.domino import PREFIX
from drafttrain.model.target import Target


def _knows(found: Foreign) -> bool:
    return found.has("prefix_gru.weight_ih_l0", "embed_proj.0.weight") and TYPE not in found.config


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    shifted = found.field("shift_label", NESTED)
    if not isinstance(shifted, bool):
        raise UserError(f"{found.origin}: shift_label is {shifted!r}; true or false is needed")
    prefix = field_of(found, "pure_draft_prefix_len", PREFIX)
    found.wants("pure_draft_prefix_len", prefix, (PREFIX,), "but here only the first draft comes from its slot alone")
    return zlab_options(found, target) | {
        "slots": "shifted" if shifted else "in_place",
        "state": number_of(found, "gru_hidden_dim"),
        "rank": number_of(found, "emb_dim"),
    }


ROWS = [Importer("Domino", "domino", _knows, _options, shared=COPIES)]
