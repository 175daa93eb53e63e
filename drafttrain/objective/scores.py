"""Scores of predictions from the logits of drafter and target: loss, top-1 agreement and acceptance. Steps of shared heads.

Shapes: C predictions, V vocabulary, D tokens of the drafter's own vocabulary or candidates. Of a shared head: M predictions of
a step, E of a kind, C of a piece, N rows of a piece, U positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafttrain.model.batch import Prediction, TrainBatch, moved
from drafttrain.objective.chunks import CPU, NONE, HeadRows, Index, LossChunk, PredictionPart
from drafttrain.objective.teacher import TargetRows
from drafttrain.ops import divergence

Terms = Mapping[str, float]  # weight of each divergence in the loss, by its name in `ops.divergence`


class ScoresFunction(torch.autograd.Function):
    """Autograd function: (loss_C, top1_C, acceptance_C) from the logits of both models.

    It saves one tensor for the backward pass, dloss/dlogits, which is computed together with the loss (`ops.divergence`).
    inplace: it may take the place of the logits, which nothing reads afterwards. row_C, whole_C: as for `divergence.scores`.
    grad_output_C: the gradient that the backward pass will be given, where it is known; it is multiplied in at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: Tensor,
        target_logits_CV: Tensor,
        label_C: Tensor,
        terms: Terms,
        inplace: bool = False,
        row_C: Tensor | None = None,
        whole_C: Tensor | None = None,
        grad_output_C: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = ctx.needs_input_grad[0]
        (first_name, weight), *other_terms = terms.items()
        ctx.scaled = grad_output_C is not None and not other_terms
        grad_output_C = grad_output_C if ctx.scaled else None
        out_CV = logits_CV if inplace and not other_terms else None
        scores = divergence.scores(
            logits_CV, target_logits_CV, label_C, first_name, needs_grad, out_CV, row_C, whole_C, grad_output_C
        )
        loss_C, grad_logits_CV = scores.loss_C, scores.grad_logits_CV
        if weight != 1.0 or other_terms:
            loss_C = weight * loss_C
            grad_logits_CV = None if grad_logits_CV is None else grad_logits_CV.mul_(weight)
        for name, weight in other_terms:
            term_scores = divergence.scores(logits_CV, target_logits_CV, label_C, name, needs_grad, None, row_C)
            loss_C = loss_C + weight * term_scores.loss_C
            if grad_logits_CV is not None and term_scores.grad_logits_CV is not None:
                grad_logits_CV.add_(term_scores.grad_logits_CV, alpha=weight)
        if grad_logits_CV is not None:
            ctx.save_for_backward(grad_logits_CV)
        ctx.mark_non_differentiable(scores.top1_C, scores.acceptance_C)
        return loss_C, scores.top1_C, scores.acceptance_C

    @staticmethod
    def backward(ctx: Any, grad_C: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None, None, None, None]:
        (grad_logits_CV,) = ctx.saved_tensors
        if not ctx.scaled:
            grad_logits_CV.mul_(grad_C[:, None].to(grad_logits_CV.dtype))  # needed once
        return grad_logits_CV, None, None, None, None, None, None, None


def scores_of(
    prediction: Prediction,
    logits_CD: Tensor,
    target: TargetRows,
    label_C: Tensor,
    terms: Terms,
    end_to_end: bool = False,
    inplace: bool = False,
    grad_output_C: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_C, top1_C, acceptance_C) of some predictions of a step, from its head's logits.

    end_to_end: where the head's vocabulary is a part of the target's, the loss is one minus the acceptance. inplace: the
    gradient may take the place of the logits. grad_output_C: of loss_C, as for `ScoresFunction`.
    """
    if prediction.vocab_D is not None:
        return restricted(logits_CD, target, label_C, terms, prediction.vocab_D, end_to_end, inplace, grad_output_C)
    if prediction.offers is not None:
        return offered(logits_CD, target, label_C, terms, prediction.offers, end_to_end, grad_output_C)
    place_C, logits_UV = target.place_C, target.chunk.logits_UV
    logits_UV, row_C = (logits_UV[place_C], None) if isinstance(place_C, slice) else (logits_UV, place_C)
    scored_C: tuple[Tensor, Tensor, Tensor] = ScoresFunction.apply(
        logits_CD, logits_UV, label_C, terms, inplace, row_C, None, grad_output_C
    )
    return scored_C


def restricted(
    logits_CD: Tensor,
    target: TargetRows,
    label_C: Tensor,
    terms: Terms,
    vocab_D: Tensor,
    end_to_end: bool = False,
    inplace: bool = False,
    grad_output_C: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ScoresFunction` of a drafter whose vocabulary is a part of the target's (arXiv 2503.01840, the official code).

    The loss compares with the target's distribution over that part, renormalised. It is 0 where the target's likeliest token
    (for ce: the label) is outside the part. Hits and acceptance are those of the whole vocabulary, where the drafter's
    probability outside its part is 0. end_to_end: the loss is one minus that acceptance instead.
    """

    def place(token_C: Tensor) -> Tensor:
        index_C = torch.searchsorted(vocab_D, token_C).clamp_max(len(vocab_D) - 1)
        return torch.where(vocab_D[index_C] == token_C, index_C, -1)

    part_logits = PartLogits(target.columns(vocab_D), target.log_sum(), place(target.best()), place(label_C))
    return _scores_over_part(logits_CD, part_logits, terms, end_to_end, inplace and len(terms) == 1, grad_output_C)


def offered(
    logits_CV: Tensor,
    target: TargetRows,
    label_C: Tensor,
    terms: Terms,
    count: int,
    end_to_end: bool = False,
    grad_output_C: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `restricted`, for a head that offers only its `count` likeliest tokens of each prediction."""
    token_CD = logits_CV.detach().topk(count, -1).indices

    def place(token_C: Tensor) -> Tensor:
        match_CD = token_CD == token_C[:, None]
        return torch.where(match_CD.any(-1), match_CD.int().argmax(-1), -1)

    part_logits = PartLogits(target.of(token_CD), target.log_sum(), place(target.best()), place(label_C))
    return _scores_over_part(logits_CV.gather(1, token_CD), part_logits, terms, end_to_end, grad_output_C=grad_output_C)


class PartLogits(NamedTuple):
    """The target's logits over a part of the vocabulary."""

    logits_CD: Tensor
    log_sum_C: Tensor  # over the whole vocabulary
    best_C: Tensor  # index of the target's likeliest token within the part, or -1
    label_C: Tensor  # index of the true token within the part, or -1


def _scores_over_part(
    logits_CD: Tensor,
    part_logits: PartLogits,
    terms: Terms,
    end_to_end: bool,
    inplace: bool = False,
    grad_output_C: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    best_C, label_C = part_logits.best_C, part_logits.label_C
    # before a gradient takes the logits' place
    overlap_C = divergence.overlap(logits_CD, part_logits.logits_CD, part_logits.log_sum_C) if end_to_end else None
    loss_C = torch.zeros_like(part_logits.log_sum_C)
    top1_C, acceptance_C = torch.zeros_like(label_C, dtype=torch.bool), loss_C
    for name, weight in terms.items():
        by_target = name in divergence.OF_DISTRIBUTIONS
        learnt_C = (label_C if name == "ce" else best_C if by_target else torch.minimum(label_C, best_C)) >= 0
        term_grad_C = None if grad_output_C is None or end_to_end else torch.where(learnt_C, weight * grad_output_C, 0.0)
        score_args = (
            logits_CD,
            part_logits.logits_CD,
            label_C.clamp_min(0),
            {name: 1.0},
            inplace,
            None,
            part_logits.log_sum_C,
            term_grad_C,
        )
        term_loss_C, top1_C, acceptance_C = ScoresFunction.apply(*score_args)
        loss_C = loss_C + weight * torch.where(learnt_C, term_loss_C, 0.0)
    if overlap_C is not None:
        loss_C, acceptance_C = 1.0 - overlap_C, overlap_C
    return loss_C, top1_C & (best_C >= 0), acceptance_C.detach()


def shared_steps(predictions: Sequence[Prediction], batch: TrainBatch) -> dict[Hashable, SharedSteps]:
    """The steps of each shared head, by the head."""
    by_head: dict[Hashable, list[Prediction]] = {}
    for prediction in predictions:
        if prediction.shared is not None:
            by_head.setdefault(prediction.shared.head, []).append(prediction)
    return {head: SharedSteps(steps, batch) for head, steps in by_head.items()}


class SharedSteps:
    """The steps of one shared head, and `kinds`, which are scored in their place: the predictions of each kind as one step.

    `model.batch.Shared` says what rows and columns are. A kind's predictions are in the order of rows, then columns. A piece
    has whole rows, because the head makes all their logits at once.

    Worked example: two columns and the rows 0, 1 and 2, where row 2 has no prediction in column 1. A kind's predictions are

        number    0  1  2  3  4
        row       0  0  1  1  2
        column    0  1  0  1  0

    With two kinds, and at most eight predictions at once, a piece has two rows. The first has the predictions 0 to 3 of both
    kinds, the second prediction 4: entry 0 of the two that the head gives for row 2.
    """

    def __init__(self, predictions: Sequence[Prediction], batch: TrainBatch) -> None:
        by_kind: dict[int, dict[int, Prediction]] = {}
        for prediction in predictions:
            assert prediction.shared is not None
            by_kind.setdefault(prediction.shared.kind, {})[prediction.shared.column] = prediction
        self.columns = len(by_kind[0])
        kinds = [[by_kind[kind][column] for column in range(self.columns)] for kind in range(len(by_kind))]
        first, rows = kinds[0], [batch.on_host(p.shared.row_M) for p in kinds[0] if p.shared is not None]
        row_E, counts = torch.cat(rows), [len(row_M) for row_M in rows]
        column_E = torch.arange(self.columns).repeat_interleave(torch.tensor(counts))
        order_E = (row_E * self.columns + column_E).argsort()
        self.row_E, self.column_E = row_E[order_E], column_E[order_E]
        self.position_E = torch.cat([batch.teacher_index(batch.on_host(p.label_M)) for p in first])[order_E]
        device = first[0].label_M.device
        self.kinds = [_joined(steps, moved(order_E, device)) for steps in kinds]
        self._numbers = moved(order_E.argsort(), device).split(counts)

    def number_M(self, column: int) -> Tensor:
        """Numbers of a step's predictions among those of its kind."""
        return self._numbers[column]

    def chunks(self, first: int, at_once: int, device: torch.device = CPU) -> Iterator[LossChunk]:
        """As `objective.chunks`: where a row has more than `at_once` predictions, a piece has one row.

        first: the number of the first kind's step.
        """
        steps = range(first, first + len(self.kinds))
        if not len(self.row_E):
            yield LossChunk(
                moved(self.position_E, device), [[PredictionPart(step, NONE, NONE, 0, HeadRows(NONE)) for step in steps]]
            )
            return
        rows, counts = self.row_E.unique_consecutive(return_counts=True)
        rows_per_piece = max(1, at_once // (self.columns * len(self.kinds)))
        begins = [0, *counts.cumsum(0)[rows_per_piece - 1 :: rows_per_piece].tolist()]
        begins += [len(self.row_E)] if begins[-1] < len(self.row_E) else []
        row_pieces = [(a, b, rows[i * rows_per_piece : (i + 1) * rows_per_piece]) for i, (a, b) in enumerate(pairwise(begins))]
        all_U, index_E = self.position_E.unique(return_inverse=True)
        for group in _groups(row_pieces, index_E, at_once):
            a, b = group[0][0], group[-1][1]
            needed_U, place_C = index_E[a:b].unique(return_inverse=True)
            place_C, pieces = moved(place_C, device), []
            for begin, end, row_N in group:
                head_rows = HeadRows(_index(row_N, device), self._entries(begin, end, row_N, device))
                part_args = slice(begin, end), place_C[begin - a : end - a], end - begin, head_rows
                pieces.append([PredictionPart(step, *part_args) for step in steps])
            yield LossChunk(moved(all_U[needed_U], device), pieces)

    def _entries(self, begin: int, end: int, row_N: Tensor, device: torch.device) -> Tensor | None:
        """Which of the rows' logits are the predictions from `begin` to `end`; None: all."""
        if end - begin == len(row_N) * self.columns:
            return None
        number_C = torch.searchsorted(row_N, self.row_E[begin:end])
        return moved(number_C * self.columns + self.column_E[begin:end], device)


Piece = tuple[int, int, Tensor]  # its predictions' begin and end, and its rows


def _groups(pieces: Sequence[Piece], index_E: Tensor, at_once: int) -> Iterator[list[Piece]]:
    """Consecutive pieces whose positions lie within `at_once`, so that they share the target's logits; at least one."""
    group, low, high = list[Piece](), 0, 0
    for piece in pieces:
        piece_low, piece_high = (int(x) for x in index_E[piece[0] : piece[1]].aminmax())
        if group and max(high, piece_high) - min(low, piece_low) >= at_once:
            yield group
            group = []
        low, high = (min(low, piece_low), max(high, piece_high)) if group else (piece_low, piece_high)
        group.append(piece)
    yield group


def _index(row_N: Tensor, device: torch.device) -> Index:
    first, last = int(row_N[0]), int(row_N[-1])
    return slice(first, last + 1) if last - first + 1 == len(row_N) else moved(row_N, device)


def _joined(steps: Sequence[Prediction], order_E: Tensor) -> Prediction:
    """The predictions of all steps as those of one, in another order."""
    weights = [torch.zeros_like(p.label_M, dtype=torch.float32) + p.weight for p in steps]
    fields = ([p.source_M for p in steps], [p.label_M for p in steps], weights)
    source_E, label_E, weight_E = (torch.cat(field_tensors)[order_E] for field_tensors in fields)
    return replace(steps[0], source_M=source_E, label_M=label_E, weight=weight_E)
