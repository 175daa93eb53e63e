"""DFlash2: speculators' layout."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.dflash import speculators_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer, speculators
from drafttrain.export.layouts.dflash2 import RENAMES
from drafttrain.model.convolution import TAPS
from drafttrain.model.target import Target


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    found.wants("conv_kernel_size", found.config.get("conv_kernel_size", TAPS), (TAPS,), "but convolutions here have two taps")
    return speculators_options(found, target, non_causal=True) | {
        "group": found.number("conv_group_size"),
        "rank": found.number("selector_rank"),
        "candidates": found.number("selector_top_k"),
    }


ROWS = [Importer("speculators", "dflash2", speculators("dflash2"), _options, RENAMES)]
