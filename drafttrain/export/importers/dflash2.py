"""DFlash2: the layouts of the authors (z-lab) and of speculators."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.block_fields import check_factor, field_of, number_of
from drafttrain.export.importers.dflash import COPIES, speculators_options, zlab_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import TYPE, Importer, speculators
from drafttrain.export.layouts.dflash2 import BOOKS, CAP, MULTIPLIER, RENAMES
from drafttrain.export.layouts.target_ends import logit_ends
from drafttrain.model.convolution import TAPS
from drafttrain.model.target import Target


def _zlab(found: Foreign) -> bool:
    return found.has(*BOOKS) and TYPE not in found.config


def _zlab_options(found: Foreign, target: Target) -> dict[str, Any]:
    scale, cap = logit_ends(target)
    check_factor(found, MULTIPLIER, scale, 1.0)
    check_factor(found, CAP, cap or 0.0, 0.0)
    return zlab_options(found, target) | _own(found)


def _speculators_options(found: Foreign, target: Target) -> dict[str, Any]:
    return speculators_options(found, target, non_causal=True) | _own(found)


def _own(found: Foreign) -> dict[str, Any]:
    found.wants("conv_kernel_size", field_of(found, "conv_kernel_size", TAPS), (TAPS,), "but convolutions here have two taps")
    return {
        "group": number_of(found, "conv_group_size"),
        "rank": number_of(found, "selector_rank"),
        "candidates": number_of(found, "selector_top_k"),
    }


ROWS = [
    Importer("z-lab", "dflash2", _zlab, _zlab_options, RENAMES, COPIES),
    Importer("speculators", "dflash2", speculators("dflash2"), _speculators_options, RENAMES, COPIES),
]
