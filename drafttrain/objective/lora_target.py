"""The objective of a family that also trains the target: the drafter's loss, and one that keeps the target near the original.

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
from drafttrain.model.lora import LoraSpec
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.objective.losses import LossOptions, Objective, StepCounts
from drafttrain.objective.scores import ScoresFunction
from drafttrain.targets.adapt import Adapter


class AdaptedObjective(Objective):
    """Joint training of drafter and target (arXiv 2401.10774, sections 2.2.2 and 2.3.2).

    loss = weight(progress) * the drafter's loss against the adapted target's own distribution + the sum over supervised tokens
    of KL(original || adapted), or of -log adapted(token). Gradients of the first term also flow through the adapted target's
    states. The engine trains, shards and saves the adapter's matrices with the drafter. The original's weights are no part of
    this module.
    """

    def __init__(self, drafter: Drafter, target: Target, options: LossOptions, adapter: Adapter) -> None:
        super().__init__(drafter, target, options)
        self.adapter = adapter

    def forward(self, batch: TrainBatch, progress: float = 1.0) -> tuple[Tensor, StepCounts]:
        """As `Objective.forward`, for a batch without states. progress: share of the training steps done after this one."""
        spec, drafter_only = self.adapter.spec, progress <= self.adapter.spec.start
        with torch.set_grad_enabled(torch.is_grad_enabled() and not drafter_only):
            hidden = _states(self.adapter.target, batch, self.drafter.taps | Taps(final=True))
        total, counts = super().forward(replace(batch, hidden=hidden), progress)
        total = drafter_weight(spec, progress) * total
        if drafter_only:  # zero gradients: sharded engines wait for a gradient of every parameter
            return total + 0.0 * torch.stack([p.float().sum() for p in self.adapter.parameters()]).sum(), counts
        return total + self._hold(batch, hidden[FINAL]), counts

    def _hold(self, batch: TrainBatch, final_BTH: Tensor) -> Tensor:
        """The sum over supervised tokens of the loss that keeps the adapted target near the original, or near the text."""
        pairs, original, name = batch.future(1), self._target.module, "kl" if self.adapter.spec.hold == "distil" else "ce"
        reference_BTH = final_BTH.detach()
        if name == "kl":
            with torch.no_grad():
                reference_BTH = _states(original, batch, Taps(final=True))[FINAL]
        teacher_index_M = batch.teacher_index(pairs.label_M)

        def chunk(adapted_CH: Tensor, reference_CH: Tensor, label_C: Tensor) -> Tensor:
            logits_CV = self.adapter.target.head(adapted_CH)
            with torch.no_grad():
                target_logits_CV = original.head(reference_CH) if name == "kl" else logits_CV
            loss_C: Tensor = ScoresFunction.apply(logits_CV, target_logits_CV, label_C, {name: 1.0})[0]
            return loss_C.sum()

        inputs = (
            final_BTH.flatten(0, 1)[teacher_index_M],
            reference_BTH.flatten(0, 1)[teacher_index_M],
            batch.token_BT.flatten()[pairs.label_M],
        )
        chunks = list(zip(*(t.split(self.at_once) for t in inputs), strict=True))
        if len(chunks) == 1:
            return chunk(*chunks[0])
        return torch.stack([checkpoint(chunk, *chunk_inputs, use_reentrant=False) for chunk_inputs in chunks]).sum()


def drafter_weight(spec: LoraSpec, progress: float) -> float:
    """Weight of the drafter's loss: constant while the drafter trains alone; with a ramp then times sin(pi / 2 * progress)."""
    return spec.drafter_weight * (math.sin(0.5 * math.pi * progress) if spec.ramp and progress > spec.start else 1.0)


def rate_scale(spec: LoraSpec, progress: float, warmup: float) -> float:
    """The matrices' learning rate divided by the drafter's.

    It is 0 while the drafter trains alone. Then it warms up over the same share of the steps as the drafter's own rate.
    """
    if progress <= spec.start:
        return 0.0
    warm = (progress - spec.start) / warmup if spec.start and warmup else 1.0
    return spec.lr_scale * min(1.0, warm)


def _states(target: Target, batch: TrainBatch, taps: Taps) -> dict[int, Tensor]:
    return target(batch.token_BT, None, batch.sees(), batch.position_BT, taps, batch.token_BT[:, :0]).hidden
