"""DFlash2: the authors' (z-lab) layout, which serving stacks read, and speculators' layout."""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts import dflash
from drafttrain.export.layouts.dflash import facts, speculators_config, zlab_config
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.target_ends import embedding_scale, logit_ends, refuse_logits
from drafttrain.model.convolution import TAPS

# stacks that apply what the target does at its ends, by fields: SGLang multiplies no embeddings, llama.cpp no logits
EMBEDS, MULTIPLIES, CAPS = ("vllm", "official"), ("vllm", "sglang", "official"), ("vllm", "sglang", "official", "llamacpp")
EMBEDDED, MULTIPLIER, CAP = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
BOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
RENAMES = Renames({f"{book}.weight": book for book in BOOKS} | {"{rest}": "{rest}"})


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    return dflash.refuse(source, EMBEDS) or refuse_logits(source, CAPS, MULTIPLIES)


def refuse_speculators(source: ExportSource) -> str | None:
    """Why speculators cannot load this drafter; None where it can. Slots may be shifted there."""
    return dflash.refuse_last(source) or refuse_logits(source)


def zlab(source: ExportSource) -> Files:
    """The authors' layout."""
    own = ends(source)
    config = zlab_config(source, "DFlash2DraftModel", **shapes(source), **own)
    known = {"factor of logits": own.get(MULTIPLIER), "soft cap": own.get(CAP)}
    return Files(config, source.named(RENAMES), facts=facts(source) | known)


def ends(source: ExportSource) -> dict[str, float]:
    """What the target does to its embedding and logits, by the authors' fields, which are absent where it does nothing."""
    scale, cap = logit_ends(source.target)
    fields = {EMBEDDED: embedding_scale(source.target), MULTIPLIER: None if scale == 1.0 else scale, CAP: cap}
    return {name: value for name, value in fields.items() if value is not None}


def speculators(source: ExportSource) -> Files:
    """speculators' layout."""
    config = speculators_config(source, "dflash2", "DFlash2DraftModel") | shapes(source)
    return Files(config, source.named(RENAMES), facts=facts(source))


def shapes(source: ExportSource) -> dict[str, Any]:
    """The fields of the convolutions and of the selector, with the same names in every layout."""
    options = source.options
    return {
        "conv_kernel_size": TAPS,
        "conv_group_size": options["group"],
        "selector_rank": options["rank"],
        "selector_top_k": options["candidates"],
    }
