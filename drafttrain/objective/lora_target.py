"""The objective of a family that also trains the target: the drafter's loss, and what holds the target in place.

Shapes: B sequences, T positions, M supervised tokens, C a chunk of them, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import FINAL, LoraSpec, Taps, Target
from drafttrain.objective.losses import LossOptions, Objective, StepCounts
from drafttrain.objective.scores import Outcome
from drafttrain.targets.adapt import Adapter


class AdaptedObjective(Objective):
    """Joint training of drafter and target (arXiv 2401.10774, sections 2.2.2 and 2.3.2).

    loss = weight(progress) * the drafter's loss against the adapted target's own law, through whose states gradients flow
    + the sum over supervised tokens of KL(original || adapted), or of -log adapted(token). The engine trains, shards and
    saves the adapter's matrices with the drafter; the original's weights are not in here.
    """

    def __init__(self, drafter: Drafter, target: Target, options: LossOptions, adapter: Adapter) -> None:
        super().__init__(drafter, target, options)
        self.adapter = adapter

    def forward(self, batch: TrainBatch, progress: float = 1.0) -> tuple[Tensor, StepCounts]:
        """As `Objective.forward`, of a batch without states. progress: the share of the steps done when this one is."""
        spec, alone = self.adapter.spec, progress <= self.adapter.spec.start
        with torch.set_grad_enabled(torch.is_grad_enabled() and not alone):
            hidden = _states(self.adapter.target, batch, self.drafter.taps | Taps(final=True))
        total, counts = super().forward(replace(batch, hidden=hidden))
        total = drafter_weight(spec, progress) * total
        if alone:  # a gradient of zeros: sharded engines wait for one of every parameter
            return total + 0.0 * torch.stack([p.float().sum() for p in self.adapter.parameters()]).sum(), counts
        return total + self._hold(batch, hidden[FINAL]), counts

    def _hold(self, batch: TrainBatch, final_BTH: Tensor) -> Tensor:
        """The sum over supervised tokens of what keeps the adapted target where it was, or near the text."""
        pairs, original, name = batch.future(1), self._target.module, "kl" if self.adapter.spec.hold == "distil" else "ce"
        law_BTH = final_BTH.detach()
        if name == "kl":
            with torch.no_grad():
                law_BTH = _states(original, batch, Taps(final=True))[FINAL]
        place_M = batch.teacher_index(pairs.label_M)

        def chunk(own_CH: Tensor, law_CH: Tensor, label_C: Tensor) -> Tensor:
            logits_CV = self.adapter.target.head(own_CH)
            with torch.no_grad():
                law_logits_CV = original.head(law_CH) if name == "kl" else logits_CV
            loss_C: Tensor = Outcome.apply(logits_CV, law_logits_CV, label_C, {name: 1.0})[0]
            return loss_C.sum()

        each = (final_BTH.flatten(0, 1)[place_M], law_BTH.flatten(0, 1)[place_M], batch.token_BT.flatten()[pairs.label_M])
        chunks = list(zip(*(t.split(self.at_once) for t in each), strict=True))
        if len(chunks) == 1:
            return chunk(*chunks[0])
        return torch.stack([checkpoint(chunk, *pieces, use_reentrant=False) for pieces in chunks]).sum()


def drafter_weight(spec: LoraSpec, progress: float) -> float:
    """Of the drafter's loss: whole while it learns alone, then risen to sin(pi / 2 * progress), or whole without a ramp."""
    return spec.drafter_weight * (math.sin(0.5 * math.pi * progress) if spec.ramp and progress > spec.start else 1.0)


def rate_scale(spec: LoraSpec, progress: float, warmup: float) -> float:
    """The matrices' learning rate / the drafter's: 0 while that learns alone, then a warm-up over as large a share of the
    steps as the drafter's own."""
    if progress <= spec.start:
        return 0.0
    warm = (progress - spec.start) / warmup if spec.start and warmup else 1.0
    return spec.lr_scale * min(1.0, warm)


def _states(target: Target, batch: TrainBatch, taps: Taps) -> dict[int, Tensor]:
    return target(batch.token_BT, None, batch.sees(), batch.position_BT, taps, batch.token_BT[:, :0]).hidden
