"""The training objective of every family: a divergence between distributions, computed in chunks, and acceptance counts.

Shapes: M predictions, C a chunk of them, K draft depth, H hidden, V vocabulary, D the drafter's own part of it, P = B * T flat
positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.sequence_shard import divided
from drafttrain.model.batch import Prediction, TrainBatch, moved
from drafttrain.model.drafter import Drafter, FrozenRef, confidence_of
from drafttrain.model.proposal import TEMPERATURES
from drafttrain.model.target import Target
from drafttrain.objective import END_TO_END, LossOptions
from drafttrain.objective.chunks import chunks
from drafttrain.objective.scoring import Gradients, Scoring, StepScores
from drafttrain.objective.teacher import Distribution, target_distribution

EVAL_CHUNK = 1024  # predictions whose logits are in memory at once in evaluation


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Sums over the predictions of each step, [K] each.

    Quotients give the logged figures: correct / total is top-1 agreement, acceptance / total is expected acceptance, and
    alive_correct / alive is alpha of a position given that the positions before it agreed.
    """

    loss: Tensor  # sum of losses
    total: Tensor  # number of predictions
    correct: Tensor  # predictions whose top-1 token is the target's
    acceptance: Tensor  # sum of acceptance, sum min(p, q)
    alive: Tensor  # predictions whose earlier steps all agreed
    alive_correct: Tensor  # of these, the ones that agree as well
    nonfinite_2B: Tensor | None = None  # rows with such a value: in the target's states; in a loss or an acceptance

    @staticmethod
    def stack(rows: list[Tensor]) -> StepCounts:
        """One [6] row per step to counts of [K] each."""
        return StepCounts(*torch.stack(rows).T)

    def packed(self) -> Tensor:
        """[6, K], for one all-reduce."""
        return torch.stack([self.loss, self.total, self.correct, self.acceptance, self.alive, self.alive_correct])

    @staticmethod
    def unpacked(packed_6K: Tensor) -> StepCounts:
        """The inverse of `packed`."""
        return StepCounts(*packed_6K)


class EndToEndLoss:
    """The end-to-end objective: for each source 1 - (1/K) * sum over depths j of P(its first j drafts are accepted).

    Each draft is accepted with its own alpha = sum min(p, q). K times the loss is the number of drafts that one verification
    fails to accept. The loss weights its steps itself; a family's decay does not apply. A depth without a label counts as
    accepted for the depths below it.
    """

    def __init__(self, batch: TrainBatch, depths: int) -> None:
        self.batch, self.depths = batch, depths
        self.alive_P = batch.token_BT.new_ones(batch.token_BT.numel(), dtype=torch.float32)

    def missed(self, prediction: Prediction, loss_M: Tensor) -> Tensor:
        """[M] P(not all drafts from the source to this depth are accepted). loss_M: 1 - alpha.

        A prediction that covers every depth gets the sum over the depths, by label.
        """
        if not prediction.every_step:
            return self._deeper(prediction.source_M, 1.0 - loss_M)
        alpha_P = torch.ones_like(self.alive_P).scatter(0, prediction.label_M, 1.0 - loss_M)
        sum_P = torch.zeros_like(self.alive_P)
        for depth in range(self.depths):
            pairs = self.batch.future(depth + 2)
            sum_P = sum_P.index_add(0, pairs.label_M, self._deeper(pairs.source_M, alpha_P[pairs.label_M]))
        return sum_P[prediction.label_M]

    def _deeper(self, source_M: Tensor, alpha_M: Tensor) -> Tensor:
        """Multiply each source's acceptance by alpha and return the missed probability."""
        alive_M = self.alive_P[source_M] * alpha_M
        self.alive_P = self.alive_P.scatter(0, source_M, alive_M)
        return 1.0 - alive_M


class Objective(nn.Module):
    """Drafter and loss in one module, so that the engine wraps everything that is trained.

    The target's logits are computed once per position, and gradients of heads together with the loss, a chunk at a time
    (`Scoring`). Only the end-to-end loss, and parameters that ZeRO-3 divides, compute the chunks again in the backward pass.
    at_once: predictions per chunk.
    """

    def __init__(self, drafter: Drafter, target: Target, options: LossOptions) -> None:
        super().__init__()
        self.drafter, self.options = drafter, options
        self.at_once = options.at_once(target.shape.vocab_size)
        self._target = FrozenRef(target)

    @property
    def vocabularies(self) -> set[int]:
        """Row counts of heads and embeddings: the target's vocabulary, and the drafter's own part of it."""
        draft_ids = getattr(self.drafter, "ids", None)
        return {self._target.module.shape.vocab_size} | (set() if draft_ids is None else {len(draft_ids)})

    def forward(self, batch: TrainBatch, progress: float = 1.0) -> tuple[Tensor, StepCounts]:
        """Returns the sum of all weighted losses over the batch's predictions, and their counts. The caller normalises.

        progress: share of the training steps that are done after this one, for objectives that change during training.
        """
        predictions, token_P = list(_predictions(self.drafter, replace(batch, progress=progress))), batch.token_BT.flatten()
        depths, distribution = self.drafter.proposal.predicted_depths, target_distribution(batch, self._target.module)
        dropped = self.options.entropy_drop * (1.0 - progress)
        if dropped and torch.is_grad_enabled():
            predictions = without_hardest(predictions, batch, distribution, dropped, self.at_once)
        end_to_end, in_parts = self.options.name == END_TO_END, torch.is_grad_enabled() and divided(self.drafter)
        scoring = Scoring(predictions, batch, distribution, self.options.terms, self.at_once, end_to_end, in_parts)
        steps, gradients = self._scored(scoring, in_parts)
        nonfinite_B = _nonfinite_scores(predictions, steps, batch)
        steps, total = self._weighed(predictions, steps, EndToEndLoss(batch, depths))
        total = total if gradients is None else gradients.attach(total)
        for prediction, step in zip(predictions, steps, strict=True):
            if prediction.confidence is not None:
                total = total + _weighted_sum(prediction.weight, _confidence_loss(prediction, step.acceptance_M))
            if prediction.aux is not None:
                total = total + prediction.aux
        counts = StepCounts.stack(_rows(predictions, steps, token_P, depths))
        return total, replace(counts, nonfinite_2B=torch.stack([batch.nonfinite(), nonfinite_B]))

    def _scored(self, scoring: Scoring, in_parts: bool) -> tuple[list[StepScores], Gradients | None]:
        """Every step's scores, and the gradients of the weighted losses; None: the losses have gradients themselves.

        in_parts: ZeRO-3 divides the heads' parameters.
        """
        if not torch.is_grad_enabled():
            return scoring.plain(), None
        if in_parts:
            return scoring.recomputed(), None
        return (scoring.differentiable(), None) if self.options.name == END_TO_END else scoring.weighted()

    def _weighed(
        self, predictions: Sequence[Prediction], steps: Sequence[StepScores], end_to_end: EndToEndLoss
    ) -> tuple[list[StepScores], Tensor]:
        """(scores, the weighted sum of all losses). In the end-to-end loss a counted step's loss is the missed probability."""
        total, step_scores = predictions[0].hidden_MH.new_zeros((), dtype=torch.float32), []
        for prediction, step in zip(predictions, steps, strict=True):
            weight = prediction.weight
            if self.options.name == END_TO_END and prediction.counted:
                weight, step = 1.0 / end_to_end.depths, replace(step, loss_M=end_to_end.missed(prediction, step.loss_M))
            step_scores.append(step)
            total = total + _weighted_sum(weight, step.loss_M)
        return step_scores, total


@torch.no_grad()
def without_hardest(
    predictions: Sequence[Prediction], batch: TrainBatch, distribution: Distribution, share: float, at_once: int
) -> list[Prediction]:
    """The predictions, without weight where the target's entropy is among the greatest: so large a share of the positions that
    the predictions are compared with. EDSD's curriculum from easy to hard tokens (ACL 2026, long 2145; SpecForge PR 696).
    """
    positions = [batch.teacher_index(p.label_M) for p in predictions]
    position_N = moved(
        torch.cat([batch.teacher_index(batch.on_host(p.label_M)) for p in predictions]).unique(), positions[0].device
    )
    entropy_N = torch.cat([distribution.entropy(place_U) for place_U in position_N.split(at_once)])
    weight_P = torch.ones(batch.token_BT.numel(), device=position_N.device)
    weight_P[position_N[entropy_N.topk(int(share * len(entropy_N))).indices]] = 0.0
    return [replace(p, weight=p.weight * weight_P[place_M]) for p, place_M in zip(predictions, positions, strict=True)]


def _rows(predictions: Sequence[Prediction], steps: Sequence[StepScores], token_P: Tensor, depths: int) -> list[Tensor]:
    """[6] sums of each counted step, in the order of `StepCounts`."""
    alive_P, rows = torch.ones_like(token_P, dtype=torch.bool), []
    for prediction, step in zip(predictions, steps, strict=True):
        if not prediction.counted:
            continue
        alive_M, top1_M = alive_P[prediction.source_M], step.top1_M
        alive_P = torch.zeros_like(alive_P).scatter(0, prediction.source_M, alive_M & top1_M)
        counts = (
            step.loss_M.detach().sum(),
            len(top1_M),
            top1_M.sum(),
            step.acceptance_M.sum(),
            alive_M.sum(),
            (alive_M & top1_M).sum(),
        )
        row = torch.stack([torch.as_tensor(c, dtype=torch.float64, device=token_P.device) for c in counts])
        rows += [row] * (depths if prediction.every_step else 1)
    return rows


@torch.no_grad()
def _nonfinite_scores(predictions: Sequence[Prediction], steps: Sequence[StepScores], batch: TrainBatch) -> Tensor:
    """[B] whether a row has a loss or an acceptance that is not finite. The device finds it: nothing waits for it here."""
    B, T = batch.token_BT.shape
    row_N = torch.cat([prediction.label_M for prediction in predictions]) // T
    nonfinite_N = ~torch.cat([step.loss_M + step.acceptance_M for step in steps]).isfinite()
    return torch.zeros(B, device=row_N.device).index_add(0, row_N, nonfinite_N.float()) > 0


def _confidence_loss(prediction: Prediction, acceptance_M: Tensor) -> Tensor:
    """[M] the cross-entropy between the drafter's confidence in each draft and its acceptance."""
    assert prediction.confidence is not None
    logit_M = prediction.confidence(prediction.hidden_MH).float()
    return F.binary_cross_entropy_with_logits(logit_M, acceptance_M, reduction="none")


def _predictions(drafter: Drafter, batch: TrainBatch) -> Iterator[Prediction]:
    """The drafter's predictions from the target's states, which are cast to the drafter's dtype."""
    dtype = next(drafter.parameters()).dtype
    yield from drafter.predict(replace(batch, hidden={key: state.to(dtype) for key, state in batch.hidden.items()}))


def _weighted_sum(weight: float | Tensor, loss_M: Tensor) -> Tensor:
    return (weight * loss_M).sum() if isinstance(weight, Tensor) else weight * loss_M.sum()


@dataclass(frozen=True, slots=True)
class Hits:
    """Teacher-forced results per source that has every depth."""

    rank_MK: Tensor  # rank of the true token among the drafter's choices, `width` if beyond
    acceptance_MK: Tensor  # acceptance, sum min(p, q)
    length_D: list[int]  # number of these sources in each document, in order
    confidence_MK: Tensor | None = None  # logits of the drafter's confidence in each draft; None: it has no confidence
    loss_T: Tensor | None = None  # by `TEMPERATURES`: see `_scores`; None: the proposal does not grow by confidence


@torch.no_grad()
def teacher_forced(drafter: Drafter, target: Target, batch: TrainBatch, width: int = 10) -> Hits:
    """The drafter's choices at every position of a text that the target wrote, given the true tokens above each depth.

    Only sources count whose first token and whole future of K tokens are supervised. The batch must carry the target's states
    or its top-k distribution.
    """
    token_P, K, confident = batch.token_BT.flatten(), drafter.proposal.predicted_depths, False
    rank_PK = torch.full((len(token_P), K), -1, device=token_P.device)
    acceptance_PK, confidence_PK = (torch.zeros(len(token_P), K, device=token_P.device) for _ in range(2))
    predictions = [p for p in _predictions(drafter, batch) if p.counted]
    loss_T = torch.zeros(len(TEMPERATURES), device=token_P.device) if drafter.proposal.grows else None
    scores = _scores(predictions, batch, target, width, drafter.confident, loss_T)
    for prediction, (rank_M, acceptance_M, confidence_M) in zip(predictions, scores, strict=True):
        if not prediction.every_step:
            if prediction.step < K:
                rank_PK[prediction.source_M, prediction.step] = rank_M
                acceptance_PK[prediction.source_M, prediction.step] = acceptance_M
                if prediction.confidence is not None:
                    confidence_M = prediction.confidence(prediction.hidden_MH).float()
                confident |= drafter.confident or prediction.confidence is not None
                confidence_PK[prediction.source_M, prediction.step] = confidence_M
            continue
        rank_P = torch.full_like(token_P, -1).scatter(0, prediction.label_M, rank_M)
        acceptance_P = torch.zeros_like(acceptance_PK[:, 0]).scatter(0, prediction.label_M, acceptance_M)
        for depth in range(K):
            pairs = batch.future(depth + 2)
            rank_PK[pairs.source_M, depth] = rank_P[pairs.label_M]
            acceptance_PK[pairs.source_M, depth] = acceptance_P[pairs.label_M]
    root_P = torch.zeros_like(token_P, dtype=torch.bool)
    root_P.index_fill_(0, batch.future(1).source_M, True)
    complete_P = (rank_PK >= 0).all(-1) & root_P
    document_P = (
        batch.document_BT + len(token_P) * torch.arange(len(batch.token_BT), device=token_P.device)[:, None]
    ).flatten()
    length_D = document_P[complete_P].unique_consecutive(return_counts=True)[1].tolist()
    confidence_MK = confidence_PK[complete_P].cpu() if confident else None
    return Hits(
        rank_PK[complete_P].cpu(),
        acceptance_PK[complete_P].cpu(),
        length_D,
        confidence_MK,
        None if loss_T is None else loss_T.cpu(),
    )


def fit_tree_confidence(drafter: Drafter, hits: Sequence[Hits]) -> None:
    """Fit the confidence by which the drafter's trees grow, where they do."""
    losses = [h.loss_T for h in hits if h.loss_T is not None]
    if losses:
        drafter.proposal.fit_confidence(torch.stack(losses).sum(0))


def _scores(
    predictions: Sequence[Prediction],
    batch: TrainBatch,
    target: Target,
    width: int,
    confident: bool,
    loss_T: Tensor | None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each step, [M] each: the true token's rank among the choices, `width` if beyond; the acceptance sum min(p, q); of a
    confident drafter the `confidence_of` its choice, else 0.

    loss_T: receives the sum of -log q(the target's likeliest token), with the drafter's logits divided by each of
    `TEMPERATURES`. Tokens outside a draft vocabulary do not count.
    """
    distribution, token_P = target_distribution(batch, target), batch.token_BT.flatten()
    empty = [torch.zeros(2, len(p.label_M), device=token_P.device) for p in predictions]
    step_scores = [(torch.empty_like(p.label_M), *means_2M) for p, means_2M in zip(predictions, empty, strict=True)]
    teacher_indices = [batch.teacher_index(batch.on_host(p.label_M)) for p in predictions]
    for chunk in chunks(teacher_indices, list(range(len(predictions))), EVAL_CHUNK, token_P.device):
        rows = distribution.at(chunk.position_U)
        for (segment,) in chunk.pieces:
            prediction = predictions[segment.step]
            draft_CD = prediction.head(prediction.hidden_MH[segment.row_C])
            p_CV = rows(segment.place_C, prediction, draft_CD).logits()
            q_CV = prediction.whole(draft_CD, p_CV.shape[-1])
            best_CR = q_CV.topk(min(width, q_CV.shape[-1]), -1)
            top1_CR = best_CR.indices == token_P[prediction.label_M[segment.row_C]][:, None]
            top1_CR = top1_CR & (best_CR.values > -torch.inf)
            rank_M, acceptance_M, confidence_M = step_scores[segment.step]
            rank_M[segment.row_C] = top1_CR.int().argmax(-1).masked_fill(~top1_CR.any(-1), width)
            acceptance_M[segment.row_C] = torch.minimum(q_CV.float().softmax(-1), p_CV.float().softmax(-1)).sum(-1)
            if confident:
                confidence_M[segment.row_C] = confidence_of(q_CV)
            if loss_T is not None:
                likeliest_C = p_CV.argmax(-1)
                losses = [F.cross_entropy(q_CV.float() / t, likeliest_C, reduction="none") for t in TEMPERATURES]
                loss_TC = torch.stack(losses)
                loss_T += loss_TC.where(loss_TC.isfinite(), 0.0).sum(1)
    return step_scores
