"""DSpark: speculators' layout."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.dflash import TYPE, speculators_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer
from drafttrain.model.target import Target


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    kind = found.config.get("markov_head_type", "vanilla")
    found.wants("markov_head_type", kind, ("vanilla",), "and the token before gives a plain bias here")
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        found.wants(key, found.config.get(key, True), (True,), "and the confidence here reads state and token before")
    return speculators_options(found, target, shifted=True) | {"rank": found.number("markov_rank")}


ROWS = [Importer("speculators", "dspark", lambda found: found.config.get(TYPE) == "dspark", _options)]
