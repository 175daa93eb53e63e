"""What some targets do at their ends besides two matrices: a factor on embeddings; a bias, a factor or a soft cap on logits.

Our drafters share the target's ends as they are, with these. Serving stacks share its two matrices alone, and some layouts have
fields for the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from drafttrain.export.files import ExportSource
from drafttrain.targets.structure import scale_of

OWN_MODULES = ("transformers",)  # stacks that embed and score by the target's own modules
SCALED = (*OWN_MODULES, "llamacpp")  # stacks that apply the factor on embeddings, by a field in the second


def refuse_embedding(source: ExportSource, scaled: tuple[str, ...] = ()) -> str | None:
    """Why a drafter that reads embeddings without a norm before cannot be exported; None where it can.

    scaled: further stacks that apply the factor, by a field of this layout.
    """
    scale = embedding_scale(source.target)
    if scale is None or source.stack in (*SCALED, *scaled):
        return None
    return (
        f"the target multiplies its embedding by {scale:.4g}, which {source.stack} leaves out for drafters of this family; "
        "choose a family that norms them first (docs/export.md), or another target"
    )


def refuse_bias(source: ExportSource) -> str | None:
    """Why a drafter that uses the target's head cannot be exported; None where it can."""
    bias = getattr(source.target.model.get_output_embeddings(), "bias", None)
    if bias is None or not bool(bias.any()) or source.stack in OWN_MODULES:
        return None
    return (
        f"the target's output matrix has a bias, which {source.stack} leaves out for drafters; choose a "
        "family with a head of its own (docs/export.md), or another target"
    )


def refuse_logits(source: ExportSource, capped: tuple[str, ...] = (), multiplied: tuple[str, ...] = ()) -> str | None:
    """Why a drafter that adds to the logits of the target's head cannot be exported; None where it can.

    A factor or a cap alone keeps the order of the logits; with something added it decides which token is drafted. capped,
    multiplied: stacks that apply the target's cap, or its factor, before they add. They differ in which of both comes first.
    """
    scale, cap = logit_ends(source.target)
    if scale == 1.0 and (cap is None or source.stack in capped):
        return None
    if cap is None and source.stack in multiplied:
        return None
    does = f"multiplies its logits by {scale:.4g}" if scale != 1.0 else f"caps its logits at {cap:g}"
    return (
        f"the target {does}, which {source.stack} leaves out where a drafter of this family adds scores to them; choose a "
        "family that adds none (docs/export.md), or another target"
    )


def logit_ends(target: Any) -> tuple[float, float | None]:
    """(the factor that a target applies to its logits, their soft cap or None)."""
    config = target.model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    return float(scale_of(config)), None if cap is None else float(cap)


def embedding_scale(target: Any) -> float | None:
    """The factor that a target applies to its embedding; None for none."""
    module: Any = target.model.get_input_embeddings()
    scale = getattr(module, "embed_scale", None)
    return None if scale is None or float(scale) == 1.0 else float(torch.as_tensor(scale).to(module.weight.dtype))
