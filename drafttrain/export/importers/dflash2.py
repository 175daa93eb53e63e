"""DFlash2: the layouts of the authors (z-lab) and of speculators."""

from __future__ import annotations

import math
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.block_fields import field_of, number_of
from drafttrain.export.importers.dflash import COPIES, speculators_options, zlab_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import TRAINED_FOR, TYPE, Importer, speculators
from drafttrain.export.layouts.dflash2 import BOOKS, CAP, EMBEDDED, MULTIPLIER, RENAMES
from drafttrain.export.layouts.target_ends import embedding_scale, logit_ends
from drafttrain.model.convolution import TAPS
from drafttrain.model.target import Target

ROUNDING = 2**-7  # relative, of a factor in bfloat16


def _zlab(found: Foreign) -> bool:
    return found.has(*BOOKS) and TYPE not in found.config


def _zlab_options(found: Foreign, target: Target) -> dict[str, Any]:
    _check_ends(found, target)
    return zlab_options(found, target) | _own(found)


def _speculators_options(found: Foreign, target: Target) -> dict[str, Any]:
    return speculators_options(found, target, non_causal=True) | _own(found)


def _check_ends(found: Foreign, target: Any) -> None:
    """Raise UserError unless the files do to embeddings and logits what this target does to its own: drafters here use these.

    Without their fields loaders leave the logits as they are. They differ in whether embeddings have the target's factor then.
    """
    scale, cap = logit_ends(target.model)
    factor = embedding_scale(target.model) or 1.0
    own = ((EMBEDDED, factor, factor), (MULTIPLIER, scale, 1.0), (CAP, cap or 0.0, 0.0))
    for key, wanted, absent in own:
        value = field_of(found, key, absent)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{found.origin}: {key} is {value!r}; a number is needed")
        if not math.isclose(value, wanted, rel_tol=ROUNDING):
            raise UserError(
                f"{found.origin}: {key} is {value:g}, this target's own is {wanted:g}, which drafters here use; {TRAINED_FOR}"
            )


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
