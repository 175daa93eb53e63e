"""The operator of the training loss: divergence of two distributions, and its gradient.

Shapes: C predictions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.gpu.accept import lowest_of_greatest
from benchmarks.gpu.case import Case, Tensors, generator
from drafttrain.ops import divergence as divergence_op


@dataclass(frozen=True)
class Divergence(Case):
    op: ClassVar = "divergence"
    twins: ClassVar = ("drafttrain.ops.divergence.reference",)
    loss: str
    rows: int
    vocab: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw, shape = generator(device, seed), (self.rows, self.vocab)
        logits_CV, target_CV = ((torch.randn(*shape, device=device, generator=draw) * 3).to(dtype) for _ in range(2))
        return {
            "logits": logits_CV,
            "target": (0.7 * logits_CV + 0.5 * target_CV).to(dtype),
            "label": torch.randint(0, self.vocab, (self.rows,), device=device, generator=draw),
        }

    def run(self, given: Tensors) -> Tensors:
        found = divergence_op.scores(given["logits"], given["target"], given["label"], self.loss, want_grad=True)
        assert found.grad_logits_CV is not None
        return {"loss": found.loss_C, "hit": found.top1_C, "mass": found.acceptance_C, "gradient": found.grad_logits_CV}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        with torch.enable_grad():
            logits_CV = wide["logits"].requires_grad_()
            loss_C, acceptance_C = defined(self.loss, logits_CV, wide["target"], wide["label"])
            (grad_logits_CV,) = torch.autograd.grad(loss_C.sum(), logits_CV)
        top1_C = lowest_of_greatest(logits_CV.detach()) == lowest_of_greatest(wide["target"])
        return {"loss": loss_C.detach(), "hit": top1_C, "mass": acceptance_C.detach(), "gradient": grad_logits_CV}

    def moved(self, dtype: torch.dtype) -> int:
        """Both models' logits; the gradient."""
        return 3 * self.rows * self.vocab * dtype.itemsize


def defined(name: str, logits_CV: Tensor, target_CV: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, overlap) by their definitions."""
    q_CV, p_CV = logits_CV.softmax(-1), target_CV.softmax(-1)
    acceptance_C = torch.minimum(q_CV, p_CV).sum(-1)
    if name == "ce":
        return -logits_CV.log_softmax(-1).gather(1, label_C[:, None])[:, 0], acceptance_C
    if name == "kl":
        return (p_CV * (target_CV.log_softmax(-1) - logits_CV.log_softmax(-1))).sum(-1), acceptance_C
    return -acceptance_C.log() if name == "lk" else 1 - acceptance_C, acceptance_C
