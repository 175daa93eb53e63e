"""The one objective of every family: a divergence between laws, chunk by chunk, with acceptance counted on the way.

Shapes: M predictions, C a chunk of them, K draft depth, H hidden, V vocabulary, D the drafter's own part of it.
"""

from __future__ import annotations

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
from drafttrain.objective.scores import Outcome, Terms, offered, restricted
from drafttrain.objective.teacher import Law, law_of
from drafttrain.ops import divergence

END_TO_END, MIX = "e2e_tv", "mix"
NAMES = (*divergence.NAMES, END_TO_END, MIX)
EVALUATED = 1024  # predictions whose logits are in memory at once where nothing is trained
LOGITS = 1 << 27  # of one model that are in memory at once at most: 1,024 predictions over 131,072 tokens


@dataclass
class LossOptions:
    """The divergence between the drafter's law q and the target's law p."""

    name: str = "kl"  # ce: the token itself. kl: KL(p || q). rkl: KL(q || p). jsd, tvd. lk: -log sum min(p, q). e2e_tv, mix
    chunk: int = 1024  # predictions whose logits are in memory at once; fewer where the target has more than 131,072 tokens
    mix: dict[str, float] = field(default_factory=dict)  # of mix: the weight of each divergence, by name

    def check(self) -> None:
        """Raise UserError for a loss that there is not."""
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
        """The end-to-end loss is made of what is not accepted."""
        return self.mix if self.name == MIX else {"tvd" if self.name == END_TO_END else self.name: 1.0}

    def at_once(self, vocab: int) -> int:
        """Predictions of a chunk: its memory has a bound that no vocabulary moves."""
        return max(1, min(self.chunk, LOGITS // vocab))


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Sums over the predictions of each step, [K] each. `alive`: predictions whose earlier steps all agreed.

    Dividing gives the logged figures: correct / total (top-1 agreement), mass / total (expected acceptance),
    alive_correct / alive (alpha of the position given the ones before).
    """

    loss: Tensor
    total: Tensor
    correct: Tensor
    mass: Tensor
    alive: Tensor
    alive_correct: Tensor

    @staticmethod
    def stack(rows: list[Tensor]) -> StepCounts:
        return StepCounts(*torch.stack(rows).T)

    def packed(self) -> Tensor:
        return torch.stack([self.loss, self.total, self.correct, self.mass, self.alive, self.alive_correct])

    @staticmethod
    def unpacked(packed_6K: Tensor) -> StepCounts:
        return StepCounts(*packed_6K)


class Reach:
    """The end-to-end objective: of every source 1 - (1/K) sum over depths j of P(its first j drafts are accepted), where each
    is accepted with its own alpha = sum min(p, q). K times this, and the bonus token, is what one verification is short of.

    The weights of the steps are its own; a family's decay is not applied. A depth without a label counts as accepted for
    the depths below it.
    """

    def __init__(self, batch: TrainBatch, depths: int) -> None:
        self.batch, self.depths = batch, depths
        self.alive_P = batch.token_BT.new_ones(batch.token_BT.numel(), dtype=torch.float32)

    def missed(self, prediction: Prediction, loss_M: Tensor) -> Tensor:
        """[M] P(not all drafts from the source to this depth are accepted), or by label, summed over the depths, for a
        prediction that stands for all of them. loss_M: 1 - alpha."""
        if not prediction.every_step:
            return self._deeper(prediction.source_M, 1.0 - loss_M)
        alpha_P = torch.ones_like(self.alive_P).scatter(0, prediction.label_M, 1.0 - loss_M)
        sum_P = torch.zeros_like(self.alive_P)
        for depth in range(self.depths):
            pairs = self.batch.future(depth + 2)
            sum_P = sum_P.index_add(0, pairs.label_M, self._deeper(pairs.source_M, alpha_P[pairs.label_M]))
        return sum_P[prediction.label_M]

    def _deeper(self, source_M: Tensor, alpha_M: Tensor) -> Tensor:
        alive_M = self.alive_P[source_M] * alpha_M
        self.alive_P = self.alive_P.scatter(0, source_M, alive_M)
        return 1.0 - alive_M


class Objective(nn.Module):
    """Drafter and loss in one module, so that the engine wraps all that is trained.

    Memory: the first chunk of predictions keeps one tensor of logits' size for the backward pass; every later chunk's
    logits are recomputed there, so that one more chunk exists at a time. at_once: predictions of a chunk.
    """

    def __init__(self, drafter: Drafter, target: Target, options: LossOptions) -> None:
        super().__init__()
        self.drafter, self.options = drafter, options
        self.at_once = options.at_once(target.shape.vocab_size)
        self._target = FrozenRef(target)

    @property
    def vocabularies(self) -> set[int]:
        """Rows of heads and embeddings: the target's tokens, and the part of them that the drafter has."""
        own = getattr(self.drafter, "ids", None)
        return {self._target.module.shape.vocab_size} | (set() if own is None else {len(own)})

    def forward(self, batch: TrainBatch, progress: float = 1.0) -> tuple[Tensor, StepCounts]:
        """(the sum of all weighted losses over this batch's predictions, their counts). The caller normalises.

        progress: the share of the steps done when this one is; for objectives that change on the way.
        """
        law, token_P = law_of(batch, self._target.module), batch.token_BT.flatten()
        alive_P = torch.ones_like(token_P, dtype=torch.bool)
        total, rows, held = token_P.new_zeros((), dtype=torch.float32), [], 0
        depths = self.drafter.proposal.predicted_depths
        reach = Reach(batch, depths) if self.options.name == END_TO_END else None
        own = next(self.drafter.parameters()).dtype
        for prediction in self.drafter.predict(replace(batch, hidden={k: h.to(own) for k, h in batch.hidden.items()})):
            place_M, label_M = batch.teacher_index(prediction.label_M), token_P[prediction.label_M]
            held += len(label_M)
            step = self._step(prediction, law, place_M, label_M, whole=held <= self.at_once)
            weight = prediction.weight
            if reach is not None and prediction.counted:
                weight, step = 1.0 / depths, replace(step, loss_M=reach.missed(prediction, step.loss_M))
            total = total + _weighed(weight, step.loss_M)
            if prediction.confidence is not None:
                total = total + _weighed(prediction.weight, step.doubt_M)
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

    def _step(self, prediction: Prediction, law: Law, place_M: Tensor, label_M: Tensor, whole: bool) -> StepOutcome:
        def chunk(hidden_CH: Tensor, place_C: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            logits_CV = prediction.head(hidden_CH)
            with torch.no_grad():
                law_logits_CV = law.logits(place_C, prediction, logits_CV)
            loss_C, hit_C, mass_C = self._outcome(prediction, logits_CV, law_logits_CV, label_C)
            if prediction.confidence is None:
                return loss_C, hit_C, mass_C, torch.zeros_like(mass_C)
            doubt_C = F.binary_cross_entropy_with_logits(prediction.confidence(hidden_CH).float(), mass_C, reduction="none")
            return loss_C, hit_C, mass_C, doubt_C

        if whole:
            return StepOutcome(*chunk(prediction.hidden_MH, place_M, label_M))
        parts = [
            checkpoint(chunk, *pieces, use_reentrant=False)
            for pieces in zip(*(t.split(self.at_once) for t in (prediction.hidden_MH, place_M, label_M)), strict=True)
        ]
        return StepOutcome(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _outcome(
        self, prediction: Prediction, logits_CV: Tensor, law_logits_CV: Tensor, label_C: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        terms, whole = self.options.terms, self.options.name == END_TO_END
        if prediction.vocab_D is not None:
            return restricted(logits_CV, law_logits_CV, label_C, terms, prediction.vocab_D, whole)
        if prediction.offers is not None:
            return offered(logits_CV, law_logits_CV, label_C, terms, prediction.offers, whole)
        found: tuple[Tensor, Tensor, Tensor] = Outcome.apply(logits_CV, law_logits_CV, label_C, terms)
        return found


def _weighed(weight: float | Tensor, loss_M: Tensor) -> Tensor:
    return (weight * loss_M).sum() if isinstance(weight, Tensor) else weight * loss_M.sum()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """doubt: cross-entropy of the confidences with the acceptance that they foretell; 0 where there are none."""

    loss_M: Tensor
    hit_M: Tensor
    mass_M: Tensor
    doubt_M: Tensor


@dataclass(frozen=True, slots=True)
class Hits:
    """Teacher-forced outcomes per source that has every depth: rank of the true token among the choices, `width` if beyond.

    length_D: how many of these sources each document has, in order. confidence_MK: logits of the drafter's confidence in each
    draft; None: it says nothing of it.
    """

    rank_MK: Tensor
    mass_MK: Tensor
    length_D: list[int]
    confidence_MK: Tensor | None = None


@torch.no_grad()
def teacher_forced(drafter: Drafter, target: Target, batch: TrainBatch, width: int = 10) -> Hits:
    """What the drafter would offer at every position of a text the target wrote, given the true tokens above each depth.

    Only sources whose root and whole future of K tokens are supervised count; the batch must carry the target's states or law.
    """
    law, token_P = law_of(batch, target), batch.token_BT.flatten()
    K, confident = drafter.proposal.predicted_depths, False
    rank_PK = torch.full((len(token_P), K), -1, device=token_P.device)
    mass_PK, confidence_PK = (torch.zeros(len(token_P), K, device=token_P.device) for _ in range(2))
    own = next(drafter.parameters()).dtype
    for prediction in drafter.predict(replace(batch, hidden={k: h.to(own) for k, h in batch.hidden.items()})):
        if not prediction.counted:
            continue
        pieces = zip(prediction.hidden_MH.split(EVALUATED), prediction.label_M.split(EVALUATED), strict=True)
        found = [_offered(prediction, law, hidden_CH, label_C, batch, width) for hidden_CH, label_C in pieces]
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


def _offered(
    prediction: Prediction, law: Law, hidden_CH: Tensor, label_C: Tensor, batch: TrainBatch, width: int
) -> tuple[Tensor, Tensor]:
    """[C] the true token's rank among the choices, `width` if beyond, and sum min(p, q)."""
    draft_CD = prediction.head(hidden_CH)
    p_CV = law.logits(batch.teacher_index(label_C), prediction, draft_CD)
    q_CV = prediction.whole(draft_CD, p_CV.shape[-1])
    best_CR = q_CV.topk(min(width, q_CV.shape[-1]), -1)
    hit_CR = (best_CR.indices == batch.token_BT.flatten()[label_C][:, None]) & (best_CR.values > -torch.inf)
    rank_C = hit_CR.int().argmax(-1).masked_fill(~hit_CR.any(-1), width)
    return rank_C, torch.minimum(q_CV.float().softmax(-1), p_CV.float().softmax(-1)).sum(-1)
