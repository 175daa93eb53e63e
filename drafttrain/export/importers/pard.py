"""PARD: a transformers directory whose configuration names a mask token."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers import draft_model
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer
from drafttrain.export.layouts.draft_model import RENAMES
from drafttrain.export.layouts.peagle import MASK
from drafttrain.model.target import Target


def _knows(found: Foreign) -> bool:
    return draft_model.whole_model(found) and MASK in found.config


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    found.wants("spd_type", found.config.get("spd_type"), (None, "pard"), "which reads more than tokens")
    return draft_model.options(found, target) | {"mask_token": found.number(MASK)}


ROWS = [
    Importer(
        "transformers", "pard", _knows, _options, RENAMES, complete=draft_model.complete, places=draft_model.PLACES, usual=None
    )
]
