"""DFlash2: the authors' (z-lab) layout, which serving stacks read, and speculators' layout."""

from __future__ import annotations

from functools import partial
from typing import Any

from drafttrain.export.block_fields import check_factor, field_of, number_of
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files, Reads
from drafttrain.export.format import Format, Importer, Renames, Rows, StackRow
from drafttrain.export.formats import dflash
from drafttrain.export.formats.dflash import (
    COPIES,
    EMBEDDED,
    facts,
    speculators_config,
    speculators_options,
    zlab_config,
    zlab_options,
)
from drafttrain.export.speculators import TYPE, speculators_type
from drafttrain.export.target_ends import embedding_scale, logit_ends, refuse_logits
from drafttrain.model.recurrent_state import TAPS
from drafttrain.model.target import Target

MULTIPLIER, CAP = "output_multiplier", "final_logit_softcapping"  # fields of what the target does to its logits
CODE = "DFlash2DraftModel.from_pretrained({directory!r})"
UNREAD = "the format that its loader reads is not known"
BOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
SHAPES = {"conv_group_size": "group", "selector_rank": "rank", "selector_top_k": "candidates"}  # our options
RENAMES = Renames({f"{book}.weight": book for book in BOOKS} | {"{rest}": "{rest}"})


def refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why a stack cannot load this drafter; None where it can. reads: as in `ROWS`."""
    return dflash.refuse(source, reads) or refuse_logits(source, reads)


def refuse_speculators(source: ExportSource) -> str | None:
    """Why speculators cannot load this drafter; None where it can. Slots may be shifted there."""
    return dflash.refuse_last(source, frozenset({"windows"})) or refuse_logits(source)


def zlab(source: ExportSource) -> Files:
    """The authors' layout."""
    config = zlab_config(source, "DFlash2DraftModel", **shapes(source), **ends(source))
    return Files(config, RENAMES.named(source.tensors))


def ends(source: ExportSource) -> dict[str, float]:
    """What the target does to its embedding and logits, by the authors' fields, which are absent where it does nothing."""
    scale, cap = logit_ends(source.target)
    fields = {EMBEDDED: embedding_scale(source.target), MULTIPLIER: None if scale == 1.0 else scale, CAP: cap}
    return {name: value for name, value in fields.items() if value is not None}


def speculators(source: ExportSource) -> Files:
    """speculators' layout."""
    config = speculators_config(source, "dflash2", "DFlash2DraftModel") | shapes(source)
    return Files(config, RENAMES.named(source.tensors))


def shapes(source: ExportSource) -> dict[str, Any]:
    """The fields of the convolutions and of the selector, with the same names in every format."""
    return {"conv_kernel_size": TAPS} | {key: source.options[option] for key, option in SHAPES.items()}


def _knows(checkpoint: ExternalCheckpoint) -> bool:
    return checkpoint.has(*BOOKS) and TYPE not in checkpoint.config


def _zlab_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    scale, cap = logit_ends(target)
    check_factor(checkpoint, MULTIPLIER, scale, 1.0)
    check_factor(checkpoint, CAP, cap or 0.0, 0.0)
    return zlab_options(checkpoint, target) | _shape_options(checkpoint)


def _speculators_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    return speculators_options(checkpoint, target, non_causal=True) | _shape_options(checkpoint)


def _shape_options(checkpoint: ExternalCheckpoint) -> dict[str, Any]:
    checkpoint.wants(
        "conv_kernel_size", field_of(checkpoint, "conv_kernel_size", TAPS), (TAPS,), "but convolutions here have two taps"
    )
    return {option: number_of(checkpoint, key) for key, option in SHAPES.items()}


ZLAB = Importer("z-lab", "dflash2", _knows, _zlab_options, RENAMES, COPIES)
SPECULATORS = Importer("speculators", "dflash2", speculators_type("dflash2"), _speculators_options, RENAMES, COPIES)
IMPORTERS = [ZLAB, SPECULATORS]


def _format(*reads: str) -> Format:
    """reads: what the stack is known to read, as in DFlash's rows, and of what the target does at its ends."""
    return Format(ZLAB.name, zlab, ZLAB, partial(refuse, reads=frozenset(reads)), facts)


_LOGITS = ("logit scale", "logit cap")
ROWS: Rows = {
    "dflash2": {
        "vllm": StackRow(_format(*dflash.VLLM, *_LOGITS, "embedding scale"), "dflash"),
        "sglang": StackRow(_format(*dflash.SGLANG, *_LOGITS), "DFLASH"),
        "trtllm": UNREAD,
        "speculators": StackRow(Format(SPECULATORS.name, speculators, SPECULATORS, refuse_speculators, facts), "dflash"),
        "official": StackRow(_format(*dflash.AUTHORS, *_LOGITS, "embedding scale"), CODE),
    }
}
