"""What a drafter's confidence in its drafts stands for, fitted to text that it was not trained on.

Shapes: B rows, M samples, K drafts.

Training teaches a confidence what share of a draft's law the target would accept, on text that is learnt meanwhile. What
decoding needs is a probability that comes true: of the draft's being accepted where those above it were, at temperature 0 as
well as above. So each position has a line for either, p = sigmoid(scale * logit + shift) (Platt 1999), rising, so that drafts
keep their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HOLD = 10.0  # samples that speak for the line as it was: few samples move it little
LEAST = 0.05  # of a scale
BINS = 10
NAME = "calibration"


class Calibration(nn.Module):
    """lines: [greedy, sampled][draft][scale, shift]."""

    line_2K2: Tensor

    def __init__(self, drafts: int) -> None:
        super().__init__()
        self.lines = [[[1.0, 0.0] for _ in range(drafts)] for _ in range(2)]
        self.register_buffer("line_2K2", torch.tensor(self.lines), persistent=False)

    def forward(self, logit_BK: Tensor, sampled: bool) -> Tensor:
        """[B, K] P(draft k is accepted, if those above it are); fewer drafts than there are lines will do."""
        scale_K, shift_K = self.line_2K2[int(sampled), : logit_BK.shape[1]].float().unbind(-1)
        return (scale_K * logit_BK.float() + shift_K).sigmoid()

    def fit(self, logit_MK: Tensor, hit_MK: Tensor, mass_MK: Tensor) -> None:
        """hit_MK: 1 where the draft was the text's token, mass_MK: the share of its law that the target accepts."""
        self._take([_lines(logit_MK, accepted_MK) for accepted_MK in (hit_MK.float(), mass_MK)])

    def settings(self) -> dict[str, Any]:
        """As `Drafter.decode_settings`."""
        return {NAME: self.lines}

    def use(self, settings: dict[str, Any]) -> None:
        if NAME in settings:
            self._take(settings[NAME])

    def _take(self, lines: list[list[list[float]]]) -> None:
        self.lines = lines
        self.line_2K2.copy_(torch.tensor(lines))


def reached(accepted_MK: Tensor) -> Tensor:
    """[M, K] P(all drafts above each are accepted)."""
    return F.pad(accepted_MK, (1, 0), value=1.0)[:, :-1].cumprod(1)


def expected_error(sure_MK: Tensor, accepted_MK: Tensor) -> float | None:
    """By how much a confidence is off where it is asked for: the mean over `BINS` equal ranges of it, weighed by what falls in
    each, of |its mean - the share accepted| (Naeini et al. 2015); None without samples."""
    weight_M, sure_M, accepted_M = (x.flatten().double() for x in (reached(accepted_MK), sure_MK, accepted_MK))
    if not float(weight_M.sum()):
        return None
    bin_M = (sure_M * BINS).long().clamp(0, BINS - 1)
    apart_N = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bin_M, weight_M * (sure_M - accepted_M))
    return float(apart_N.abs().sum() / weight_M.sum())


def _lines(logit_MK: Tensor, accepted_MK: Tensor) -> list[list[float]]:
    parts = (x.double().unbind(1) for x in (logit_MK, accepted_MK, reached(accepted_MK)))
    return [_line(*column) for column in zip(*parts, strict=True)]


@torch.enable_grad()
def _line(logit_M: Tensor, accepted_M: Tensor, weight_M: Tensor) -> list[float]:
    """[scale, shift] of least cross-entropy."""
    start_2 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    line_2 = start_2.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([line_2], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        told_M = line_2[0] * logit_M + line_2[1]
        apart_M = F.binary_cross_entropy_with_logits(told_M, accepted_M, reduction="none")
        total = ((weight_M * apart_M).sum() + HOLD * (line_2 - start_2).square().sum()) / (weight_M.sum() + HOLD)
        total.backward()
        return total

    optimizer.step(loss)
    scale, shift = line_2.tolist()
    return [max(scale, LEAST), shift]
