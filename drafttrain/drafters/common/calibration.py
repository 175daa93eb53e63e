"""Calibration of a drafter's confidences: lines fitted to text that the drafter was not trained on.

Shapes: B rows, M samples, K drafts.

Training teaches a confidence which share of a draft's distribution the target accepts, on text that the drafter learns at the
same time. Decoding needs a calibrated probability: that the draft is accepted if those above it were, at temperature 0 as well
as above. So each position has two lines, p = sigmoid(scale * logit + shift) (Platt 1999), one for each case. Scales are
positive, so that drafts keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HOLD = 10.0  # weight of the identity line, in samples: few samples move it little
LEAST = 0.05  # of a scale
BINS = 10
NAME = "calibration"


class PlattCalibration(nn.Module):
    """A `Calibration` by one line for each draft, once for argmax drafts and once for sampled ones."""

    line_2K2: Tensor

    def __init__(self, drafts: int) -> None:
        super().__init__()
        self.lines = [[[1.0, 0.0] for _ in range(drafts)] for _ in range(2)]  # [argmax, sampled][draft][scale, shift]
        self.register_buffer("line_2K2", torch.tensor(self.lines), persistent=False)

    def acceptance_probability(self, confidence_MK: Tensor, sampled: bool) -> Tensor:
        """[M, K] P(draft k is accepted, if those above it are), on the device of the logits. K may be less than the lines."""
        scale_K, shift_K = self.line_2K2[int(sampled), : confidence_MK.shape[1]].float().unbind(-1)
        probability_MK = (scale_K * confidence_MK.to(scale_K.device).float() + shift_K).sigmoid()
        return probability_MK.to(confidence_MK.device)

    def fit(self, confidence_MK: Tensor, top1_MK: Tensor, acceptance_MK: Tensor) -> None:
        """top1_MK: 1 where the draft was the text's token. acceptance_MK: the share of its distribution that is accepted."""
        self._take([_lines(confidence_MK, accepted_MK) for accepted_MK in (top1_MK.float(), acceptance_MK)])

    def settings(self) -> dict[str, Any]:
        return {NAME: self.lines}

    def use(self, settings: Mapping[str, Any]) -> None:
        if NAME in settings:
            self._take(settings[NAME])

    def _take(self, lines: list[list[list[float]]]) -> None:
        self.lines = lines
        self.line_2K2.copy_(torch.tensor(lines))


def reached(accepted_MK: Tensor) -> Tensor:
    """[M, K] P(all drafts above each are accepted)."""
    return F.pad(accepted_MK, (1, 0), value=1.0)[:, :-1].cumprod(1)


def expected_error(confidence_MK: Tensor, accepted_MK: Tensor) -> float | None:
    """The expected calibration error (Naeini et al. 2015): the weighted mean of |mean confidence - share accepted| over `BINS`
    equal ranges of the confidence. A draft counts by the probability that decoding reaches it. None without samples."""
    weight_M, confidence_M, accepted_M = (x.flatten().double() for x in (reached(accepted_MK), confidence_MK, accepted_MK))
    if not float(weight_M.sum()):
        return None
    bin_M = (confidence_M * BINS).long().clamp(0, BINS - 1)
    gap_N = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bin_M, weight_M * (confidence_M - accepted_M))
    return float(gap_N.abs().sum() / weight_M.sum())


def _lines(logit_MK: Tensor, accepted_MK: Tensor) -> list[list[float]]:
    columns = (x.double().unbind(1) for x in (logit_MK, accepted_MK, reached(accepted_MK)))
    return [_line(*column) for column in zip(*columns, strict=True)]


@torch.enable_grad()
def _line(logit_M: Tensor, accepted_M: Tensor, weight_M: Tensor) -> list[float]:
    """[scale, shift] of least cross-entropy."""
    start_2 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    line_2 = start_2.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([line_2], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        calibrated_M = line_2[0] * logit_M + line_2[1]
        entropy_M = F.binary_cross_entropy_with_logits(calibrated_M, accepted_M, reduction="none")
        total = ((weight_M * entropy_M).sum() + HOLD * (line_2 - start_2).square().sum()) / (weight_M.sum() + HOLD)
        total.backward()
        return total

    optimizer.step(loss)
    scale, shift = line_2.tolist()
    return [max(scale, LEAST), shift]
