"""DFlash2: speculators' layout."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.dflash import TYPE, speculators_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer
from drafttrain.export.layouts.dflash2 import RENAMES
from drafttrain.export.layouts.renames import Renames
from drafttrain.model.convolution import TAPS
from drafttrain.model.target import Target


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    found.wants("conv_kernel_size", found.config.get("conv_kernel_size", TAPS), (TAPS,), "and convolutions here have two taps")
    return speculators_options(found, target) | {
        "group": found.number("conv_group_size"),
        "rank": found.number("selector_rank"),
        "candidates": found.number("selector_top_k"),
    }


def _renames(found: Foreign) -> Renames:
    return RENAMES


ROWS = [Importer("speculators", "dflash2", lambda found: found.config.get(TYPE) == "dflash2", _options, _renames)]
