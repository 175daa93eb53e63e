"""Scores of predictions from the logits of drafter and target: loss, top-1 agreement and acceptance.

Shapes: C predictions, V vocabulary, D tokens of the drafter's own vocabulary or candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.ops import divergence

Terms = Mapping[str, float]  # weight of each divergence in the loss, by its name in `ops.divergence`


class Scores(torch.autograd.Function):
    """Autograd function: (loss_C, hit_C, mass_C) from the logits of both models.

    It saves one tensor for the backward pass, dloss/dlogits, which is computed together with the loss (`ops.divergence`).
    """

    @staticmethod
    def forward(
        ctx: Any, logits_CV: Tensor, target_logits_CV: Tensor, label_C: Tensor, terms: Terms
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        (first, weight), *others = terms.items()
        found = divergence.scores(logits_CV, target_logits_CV, label_C, first, wanted)
        loss_C, slope_CV = found.loss_C, found.slope_CV
        if weight != 1.0 or others:
            loss_C = weight * loss_C
            slope_CV = None if slope_CV is None else slope_CV.mul_(weight)
        for name, weight in others:
            other = divergence.scores(logits_CV, target_logits_CV, label_C, name, wanted)
            loss_C = loss_C + weight * other.loss_C
            if slope_CV is not None and other.slope_CV is not None:
                slope_CV.add_(other.slope_CV, alpha=weight)
        if slope_CV is not None:
            ctx.save_for_backward(slope_CV)
        ctx.mark_non_differentiable(found.hit_C, found.mass_C)
        return loss_C, found.hit_C, found.mass_C

    @staticmethod
    def backward(ctx: Any, grad_C: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        (slope_CV,) = ctx.saved_tensors
        return slope_CV * grad_C[:, None].to(slope_CV.dtype), None, None, None


def restricted(
    logits_CD: Tensor, target_logits_CV: Tensor, label_C: Tensor, terms: Terms, vocab_D: Tensor, end_to_end: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`Scores` of a drafter whose vocabulary is a part of the target's (arXiv 2503.01840, the official code).

    The loss compares with the target's distribution over that part, renormalised. It is 0 where the target's likeliest token
    (for ce: the label) is outside the part. Hits and acceptance are those of the whole vocabulary, where the drafter's
    probability outside its part is 0. end_to_end: the loss is one minus that acceptance instead.
    """
    place_V = torch.full_like(target_logits_CV[0], -1, dtype=torch.long)
    place_V = place_V.index_copy(0, vocab_D, torch.arange(len(vocab_D), device=vocab_D.device))
    best_C, part_CD = target_logits_CV.argmax(-1), target_logits_CV[:, vocab_D].contiguous()
    return _scores_over_part(logits_CD, part_CD, target_logits_CV, place_V[best_C], place_V[label_C], terms, end_to_end)


def offered(
    logits_CV: Tensor, target_logits_CV: Tensor, label_C: Tensor, terms: Terms, count: int, end_to_end: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """As `restricted`, for a head that offers only its `count` likeliest tokens of each prediction."""
    token_CD = logits_CV.detach().topk(count, -1).indices
    best_C = target_logits_CV.argmax(-1)

    def place(token_C: Tensor) -> Tensor:
        same_CD = token_CD == token_C[:, None]
        return torch.where(same_CD.any(-1), same_CD.int().argmax(-1), -1)

    part_CD, logits_CD = target_logits_CV.gather(1, token_CD), logits_CV.gather(1, token_CD)
    return _scores_over_part(logits_CD, part_CD, target_logits_CV, place(best_C), place(label_C), terms, end_to_end)


def _scores_over_part(
    logits_CD: Tensor,
    part_CD: Tensor,
    target_logits_CV: Tensor,
    best_C: Tensor,
    label_C: Tensor,
    terms: Terms,
    end_to_end: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """best_C, label_C: indices of the target's likeliest token and of the true token within the part, or -1."""
    p_CD = (part_CD.float() - target_logits_CV.float().logsumexp(-1, keepdim=True)).exp()
    mass_C = torch.minimum(logits_CD.float().softmax(-1), p_CD).sum(-1)
    loss_C, hit_C = torch.zeros_like(mass_C), torch.zeros_like(label_C, dtype=torch.bool)
    for name, weight in terms.items():
        apart_C, hit_C, _ = Scores.apply(logits_CD, part_CD, label_C.clamp_min(0), {name: 1.0})
        learnt_C = (label_C if name == "ce" else best_C) >= 0
        loss_C = loss_C + weight * torch.where(learnt_C, apart_C, 0.0)
    return 1.0 - mass_C if end_to_end else loss_C, hit_C & (best_C >= 0), mass_C.detach()
