"""DFlash2: the authors' (z-lab) layout, which serving stacks read, and speculators' layout."""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import Files, Source
from drafttrain.export.layouts import dflash
from drafttrain.export.layouts.dflash import facts, speculators_config, zlab_config
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.target_ends import refuse_logits
from drafttrain.model.convolution import TAPS

CAPPED = ("llamacpp",)  # stacks that cap the logits before the selector
BOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
RENAMES = Renames({f"{book}.weight": book for book in BOOKS} | {"{rest}": "{rest}"})


def refuse(source: Source) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    return dflash.refuse(source) or refuse_logits(source, CAPPED)


def refuse_speculators(source: Source) -> str | None:
    """Why speculators cannot load this drafter; None where it can. Slots may be shifted there."""
    return dflash.refuse_last(source) or refuse_logits(source)


def zlab(source: Source) -> Files:
    """The authors' layout."""
    return Files(zlab_config(source, "DFlash2DraftModel", **shapes(source)), source.named(RENAMES), facts=facts(source))


def speculators(source: Source) -> Files:
    """speculators' layout."""
    config = speculators_config(source, "dflash2", "DFlash2DraftModel") | shapes(source)
    return Files(config, source.named(RENAMES), facts=facts(source))


def shapes(source: Source) -> dict[str, Any]:
    """The fields of the convolutions and of the selector, with the same names in every layout."""
    options = source.options
    return {
        "conv_kernel_size": TAPS,
        "conv_group_size": options["group"],
        "selector_rank": options["rank"],
        "selector_top_k": options["candidates"],
    }
