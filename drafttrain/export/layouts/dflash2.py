"""DFlash2: speculators' layout. The tensors have the names of the authors' code."""

from __future__ import annotations

from drafttrain.export.files import Files, Source
from drafttrain.export.layouts.dflash import facts, speculators_config
from drafttrain.export.layouts.renames import Renames
from drafttrain.model.convolution import TAPS

BOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
RENAMES = Renames({f"{book}.weight": book for book in BOOKS} | {"{rest}": "{rest}"})


def speculators(source: Source) -> Files:
    """speculators' layout."""
    options = source.options
    own = {
        "conv_kernel_size": TAPS,
        "conv_group_size": options["group"],
        "selector_rank": options["rank"],
        "selector_top_k": options["candidates"],
    }
    return Files(speculators_config(source, "dflash2", "DFlash2DraftModel") | own, source.named(RENAMES), facts=facts(source))
