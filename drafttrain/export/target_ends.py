"""What drafters share with their targets: the embedding, the output matrix, the last norm, and what else a target does there.

Some targets have a factor on embeddings; a bias, a factor or a soft cap on logits. Our drafters share the target's ends as they
are, with these. Serving stacks share its two matrices alone, and some formats have fields for the rest. Tensors in a published
drafter's files that are shared with the target must be this target's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import NOTHING, ExportSource, Reads
from drafttrain.targets.shallow import final_norm
from drafttrain.targets.structure import scale_of

EMBEDDING, HEAD, NORM = "embedding", "output matrix", "last norm"
TRAINED_FOR = "give the target that it was trained for with target=DIR"


def refuse_embedding(source: ExportSource, reads: Reads = NOTHING) -> str | None:
    """Why a drafter that reads embeddings without a norm before cannot be exported; None where it can.

    reads: has "embedding scale" for a stack that applies the factor, by a field of the format, and "target modules" for one
    that embeds and scores by the target's own modules.
    """
    scale = embedding_scale(source.target)
    if scale is None or reads & {"embedding scale", "target modules"}:
        return None
    return (
        f"the target multiplies its embedding by {scale:.4g}, which {source.stack} leaves out for drafters of this family; "
        "choose a family that norms them first (docs/export.md), or another target"
    )


def refuse_bias(source: ExportSource, reads: Reads = NOTHING) -> str | None:
    """Why a drafter that uses the target's head cannot be exported; None where it can. reads: as for `refuse_embedding`."""
    bias = getattr(source.target.model.get_output_embeddings(), "bias", None)
    if bias is None or not (bias.is_meta or bool(bias.any())) or "target modules" in reads:
        return None
    return (
        f"the target's output matrix has a bias, which {source.stack} leaves out for drafters; choose a "
        "family with a head of its own (docs/export.md), or another target"
    )


def refuse_logits(source: ExportSource, reads: Reads = NOTHING) -> str | None:
    """Why a drafter that adds to the logits of the target's head cannot be exported; None where it can.

    A factor or a cap alone keeps the order of the logits; with something added it decides which token is drafted. reads: has
    "logit cap" or "logit scale" for stacks that apply the target's cap, or its factor, before they add. They differ in which of
    both comes first.
    """
    scale, cap = logit_ends(source.target)
    if scale == 1.0 and (cap is None or "logit cap" in reads):
        return None
    if cap is None and "logit scale" in reads:
        return None
    operation = f"multiplies its logits by {scale:.4g}" if scale != 1.0 else f"caps its logits at {cap:g}"
    return (
        f"the target {operation}, which {source.stack} leaves out where a drafter of this family adds scores to them; choose a "
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


def same_size(found: ExternalCheckpoint, what: str, got: Any, wanted: int) -> None:
    """Raise UserError where a size is given that is not the target's."""
    if got is not None and got != wanted:
        raise UserError(
            f"{found.origin}: made for another target: its {what} is {got}, this target's is {wanted}; {TRAINED_FOR}"
        )


def check_shared(found: ExternalCheckpoint, name: str, what: str, target: Any) -> None:
    """Raise UserError unless this tensor equals the target's, up to the rounding of either."""
    target_weight = _shared(what, target).detach().cpu()
    weight = found.tensors[name]
    if target_weight.shape != weight.shape:
        raise UserError(
            f"{found.origin}: {name} is {list(weight.shape)}, this target's {what} is {list(target_weight.shape)}; "
            f"{TRAINED_FOR}"
        )
    if not is_shared(weight, what, target):
        raise UserError(f"{found.origin}: {name} is not this target's {what}, which drafters here use; {TRAINED_FOR}")


def is_shared(given: Tensor, what: str, target: Any) -> bool:
    """Whether a tensor of this shape is the target's, up to the rounding of either."""
    target_weight = _shared(what, target).detach().cpu()
    return _alike(target_weight, given) or (what == EMBEDDING and _alike(_embedded(target), given))


def _alike(target_weight: Tensor, weight: Tensor) -> bool:
    """Whether two weights are equal up to the rounding of either."""
    tolerance = 2 * max(torch.finfo(target_weight.dtype).eps, torch.finfo(weight.dtype).eps)
    return torch.allclose(
        target_weight.float(), weight.float(), rtol=tolerance, atol=tolerance * float(target_weight.abs().max()) * 2**-8
    )


@torch.no_grad()
def _embedded(target: Any) -> Tensor:
    """[V, H] all tokens as the target embeds them: some apply a factor, which files may have in them."""
    embeddings: Tensor = target.embed(torch.arange(target.shape.vocab_size, device=target.device))
    return embeddings.detach().cpu()


def _shared(module_name: str, target: Any) -> Tensor:
    if module_name == NORM:
        weight: Tensor = final_norm(target.model, target.shape.blocks).weight  # type: ignore[assignment]
        return weight
    shared_weight: Tensor = target.model.get_input_embeddings().weight if module_name == EMBEDDING else target.head_weight
    return shared_weight
