"""The training objective of every family: a divergence between distributions, computed in chunks, and acceptance counts.

Shapes: M predictions, C a chunk of them, K draft depth, H hidden, V vocabulary, D the drafter's own part of it, P = B * T flat
positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafttrain.core.errors import UserError
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.target import Target
from drafttrain.objective.scores import Scores, Terms, offered, restricted
from drafttrain.objective.teacher import Distribution, target_distribution
from drafttrain.ops import divergence

END_TO_END, MIX = "e2e_tv", "mix"
NAMES = (*divergence.NAMES, END_TO_END, MIX)
EVAL_CHUNK = 1024  # predictions whose logits are in memory at once in evaluation
MAX_LOGITS = 1 << 27  # logits of one model that are in memory at once: 1,024 predictions over 131,072 tokens


@dataclass
class LossOptions:
    """The divergence between the drafter's distribution q and the target's distribution p."""

    name: str = "kl"  # ce: the token itself. kl: KL(p || q). rkl: KL(q || p). jsd, tvd. lk: -log sum min(p, q). e2e_tv, mix
    chunk: int = 1024  # predictions whose logits are in memory at once; fewer where the target has more than 131,072 tokens
    mix: dict[str, float] = field(default_factory=dict)  # weight of each divergence by name; for name=mix only

    def check(self) -> None:
        """Raise UserError for an unknown loss, a chunk below 1, or weights that do not fit the loss."""
        if self.chunk < 1 or self.name not in NAMES:
            choice = f"choose {', '.join(NAMES)}, and a chunk of 1 or more"
            raise UserError(f"loss.name is {self.name!r}, loss.chunk {self.chunk}; {choice}")
        known = all(name in divergence.NAMES and weight > 0 for name, weight in self.mix.items())
        if not known or (self.name == MIX) != bool(self.mix):
            raise UserError(
                f"loss.name is {self.name!r}, loss.mix {self.mix}; a mix, and nothing else, has weights above 0 of some of "
                f"{', '.join(divergence.NAMES)}"
            )

    @property
    def terms(self) -> Terms:
        """Divergences and their weights. The end-to-end loss is built from 1 - acceptance, the total variation."""
        return self.mix if self.name == MIX else {"tvd" if self.name == END_TO_END else self.name: 1.0}

    def at_once(self, vocab: int) -> int:
        """Predictions per chunk. The logits of a chunk never exceed `MAX_LOGITS`, however large the vocabulary is."""
        return max(1, min(self.chunk, MAX_LOGITS // vocab))


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Sums over the predictions of each step, [K] each.

    Quotients give the logged figures: correct / total is top-1 agreement, mass / total is expected acceptance, and
    alive_correct / alive is alpha of a position given that the positions before it agreed.
    """

    loss: Tensor  # sum of losses
    total: Tensor  # number of predictions
    correct: Tensor  # predictions whose top-1 token is the target's
    mass: Tensor  # sum of acceptance, sum min(p, q)
    alive: Tensor  # predictions whose earlier steps all agreed
    alive_correct: Tensor  # of these, the ones that agree as well

    @staticmethod
    def stack(rows: list[Tensor]) -> StepCounts:
        """One [6] row per step to counts of [K] each."""
        return StepCounts(*torch.stack(rows).T)

    def packed(self) -> Tensor:
        """[6, K], for one all-reduce."""
        return torch.stack([self.loss, self.total, self.correct, self.mass, self.alive, self.alive_correct])

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

    The first chunk of predictions keeps one tensor of the logits' size for the backward pass. The logits of later chunks are
    recomputed there, one chunk at a time. at_once: predictions per chunk.
    """

    def __init__(self, drafter: Drafter, target: Target, options: LossOptions) -> None:
        super().__init__()
        self.drafter, self.options = drafter, options
        self.at_once = options.at_once(target.shape.vocab_size)
        self._target = FrozenRef(target)

    @property
    def vocabularies(self) -> set[int]:
        """Row counts of heads and embeddings: the target's vocabulary, and the drafter's own part of it."""
        own = getattr(self.drafter, "ids", None)
        return {self._target.module.shape.vocab_size} | (set() if own is None else {len(own)})

    def forward(self, batch: TrainBatch, progress: float = 1.0) -> tuple[Tensor, StepCounts]:
        """Returns the sum of all weighted losses over the batch's predictions, and their counts. The caller normalises.

        progress: share of the training steps that are done after this one, for objectives that change during training.
        """
        distribution, token_P = target_distribution(batch, self._target.module), batch.token_BT.flatten()
        alive_P = torch.ones_like(token_P, dtype=torch.bool)
        total, rows, seen = token_P.new_zeros((), dtype=torch.float32), [], 0
        end_to_end = EndToEndLoss(batch, self.drafter.proposal.predicted_depths) if self.options.name == END_TO_END else None
        for prediction in _predictions(self.drafter, batch):
            place_M, label_M = batch.teacher_index(prediction.label_M), token_P[prediction.label_M]
            seen += len(label_M)
            step = self._step(prediction, distribution, place_M, label_M, keep=seen <= self.at_once)
            weight = prediction.weight
            if end_to_end is not None and prediction.counted:
                weight, step = (
                    1.0 / self.drafter.proposal.predicted_depths,
                    replace(step, loss_M=end_to_end.missed(prediction, step.loss_M)),
                )
            total = total + _weighted_sum(weight, step.loss_M)
            if prediction.confidence is not None:
                total = total + _weighted_sum(prediction.weight, step.confidence_loss_M)
            if prediction.aux is not None:
                total = total + prediction.aux
            if not prediction.counted:
                continue
            alive_M, hit_M = alive_P[prediction.source_M], step.hit_M
            alive_P = torch.zeros_like(alive_P).scatter(0, prediction.source_M, alive_M & hit_M)
            counts = (
                step.loss_M.detach().sum(),
                len(hit_M),
                hit_M.sum(),
                step.mass_M.sum(),
                alive_M.sum(),
                (alive_M & hit_M).sum(),
            )
            row = torch.stack([torch.as_tensor(c, dtype=torch.float64, device=token_P.device) for c in counts])
            rows += [row] * (self.drafter.proposal.predicted_depths if prediction.every_step else 1)
        return total, StepCounts.stack(rows)

    def _step(
        self, prediction: Prediction, distribution: Distribution, place_M: Tensor, label_M: Tensor, keep: bool
    ) -> StepScores:
        """keep: compute all predictions in one chunk and keep what the backward pass needs."""

        def chunk(hidden_CH: Tensor, place_C: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            logits_CV = prediction.head(hidden_CH)
            with torch.no_grad():
                target_logits_CV = distribution.logits(place_C, prediction, logits_CV)
            loss_C, hit_C, mass_C = self._scores(prediction, logits_CV, target_logits_CV, label_C)
            if prediction.confidence is None:
                return loss_C, hit_C, mass_C, torch.zeros_like(mass_C)
            confidence_loss_C = F.binary_cross_entropy_with_logits(
                prediction.confidence(hidden_CH).float(), mass_C, reduction="none"
            )
            return loss_C, hit_C, mass_C, confidence_loss_C

        if keep:
            return StepScores(*chunk(prediction.hidden_MH, place_M, label_M))
        parts = [
            checkpoint(chunk, *pieces, use_reentrant=False)
            for pieces in zip(*(t.split(self.at_once) for t in (prediction.hidden_MH, place_M, label_M)), strict=True)
        ]
        return StepScores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _scores(
        self, prediction: Prediction, logits_CV: Tensor, target_logits_CV: Tensor, label_C: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        terms, end_to_end = self.options.terms, self.options.name == END_TO_END
        if prediction.vocab_D is not None:
            return restricted(logits_CV, target_logits_CV, label_C, terms, prediction.vocab_D, end_to_end)
        if prediction.offers is not None:
            return offered(logits_CV, target_logits_CV, label_C, terms, prediction.offers, end_to_end)
        found: tuple[Tensor, Tensor, Tensor] = Scores.apply(logits_CV, target_logits_CV, label_C, terms)
        return found


def _predictions(drafter: Drafter, batch: TrainBatch) -> Iterator[Prediction]:
    """The drafter's predictions from the target's states, which are cast to the drafter's dtype."""
    dtype = next(drafter.parameters()).dtype
    yield from drafter.predict(replace(batch, hidden={key: state.to(dtype) for key, state in batch.hidden.items()}))


def _weighted_sum(weight: float | Tensor, loss_M: Tensor) -> Tensor:
    return (weight * loss_M).sum() if isinstance(weight, Tensor) else weight * loss_M.sum()


@dataclass(frozen=True, slots=True)
class StepScores:
    """Scores of one step's predictions, [M] each."""

    loss_M: Tensor  # divergence
    hit_M: Tensor  # whether the top-1 token is the target's
    mass_M: Tensor  # acceptance, sum min(p, q)
    confidence_loss_M: Tensor  # cross-entropy between predicted confidence and acceptance; 0 without confidences


@dataclass(frozen=True, slots=True)
class Hits:
    """Teacher-forced results per source that has every depth."""

    rank_MK: Tensor  # rank of the true token among the drafter's choices, `width` if beyond
    mass_MK: Tensor  # acceptance, sum min(p, q)
    length_D: list[int]  # number of these sources in each document, in order
    confidence_MK: Tensor | None = None  # logits of the drafter's confidence in each draft; None: it has no confidence head


@torch.no_grad()
def teacher_forced(drafter: Drafter, target: Target, batch: TrainBatch, width: int = 10) -> Hits:
    """The drafter's choices at every position of a text that the target wrote, given the true tokens above each depth.

    Only sources count whose first token and whole future of K tokens are supervised. The batch must carry the target's states
    or its top-k distribution.
    """
    distribution, token_P = target_distribution(batch, target), batch.token_BT.flatten()
    K, confident = drafter.proposal.predicted_depths, False
    rank_PK = torch.full((len(token_P), K), -1, device=token_P.device)
    mass_PK, confidence_PK = (torch.zeros(len(token_P), K, device=token_P.device) for _ in range(2))
    for prediction in _predictions(drafter, batch):
        if not prediction.counted:
            continue
        pieces = zip(prediction.hidden_MH.split(EVAL_CHUNK), prediction.label_M.split(EVAL_CHUNK), strict=True)
        found = [_ranks_and_mass(prediction, distribution, hidden_CH, label_C, batch, width) for hidden_CH, label_C in pieces]
        rank_M, mass_M = (torch.cat(column) for column in zip(*found, strict=True))
        if not prediction.every_step:
            if prediction.step < K:
                rank_PK[prediction.source_M, prediction.step] = rank_M
                mass_PK[prediction.source_M, prediction.step] = mass_M
                if prediction.confidence is not None:
                    confident = True
                    confidence_PK[prediction.source_M, prediction.step] = prediction.confidence(prediction.hidden_MH).float()
            continue
        rank_P = torch.full_like(token_P, -1).scatter(0, prediction.label_M, rank_M)
        mass_P = torch.zeros_like(mass_PK[:, 0]).scatter(0, prediction.label_M, mass_M)
        for depth in range(K):
            pairs = batch.future(depth + 2)
            rank_PK[pairs.source_M, depth] = rank_P[pairs.label_M]
            mass_PK[pairs.source_M, depth] = mass_P[pairs.label_M]
    root_P = torch.zeros_like(token_P, dtype=torch.bool)
    root_P[batch.future(1).source_M] = True
    whole_P = (rank_PK >= 0).all(-1) & root_P
    document_P = (
        batch.document_BT + len(token_P) * torch.arange(len(batch.token_BT), device=token_P.device)[:, None]
    ).flatten()
    length_D = document_P[whole_P].unique_consecutive(return_counts=True)[1].tolist()
    confidence_MK = confidence_PK[whole_P].cpu() if confident else None
    return Hits(rank_PK[whole_P].cpu(), mass_PK[whole_P].cpu(), length_D, confidence_MK)


def _ranks_and_mass(
    prediction: Prediction, distribution: Distribution, hidden_CH: Tensor, label_C: Tensor, batch: TrainBatch, width: int
) -> tuple[Tensor, Tensor]:
    """[C] the true token's rank among the choices, `width` if beyond, and the acceptance sum min(p, q)."""
    draft_CD = prediction.head(hidden_CH)
    p_CV = distribution.logits(batch.teacher_index(label_C), prediction, draft_CD)
    q_CV = prediction.whole(draft_CD, p_CV.shape[-1])
    best_CR = q_CV.topk(min(width, q_CV.shape[-1]), -1)
    hit_CR = (best_CR.indices == batch.token_BT.flatten()[label_C][:, None]) & (best_CR.values > -torch.inf)
    rank_C = hit_CR.int().argmax(-1).masked_fill(~hit_CR.any(-1), width)
    return rank_C, torch.minimum(q_CV.float().softmax(-1), p_CV.float().softmax(-1)).sum(-1)
