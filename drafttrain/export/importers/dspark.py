"""DSpark: speculators' layout."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.dflash import speculators_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer, speculators
from drafttrain.model.target import Target


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    kind = found.config.get("markov_head_type", "vanilla")
    found.wants("markov_head_type", kind, ("vanilla",), "but here the token before gives a plain bias")
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        found.wants(key, found.config.get(key, True), (True,), "but the confidence here reads the state and the token before")
    return speculators_options(found, target, shifted=True) | {"rank": found.number("markov_rank")}


ROWS = [Importer("speculators", "dspark", speculators("dspark"), _options)]
