"""Coverage of the supervised tokens by a reduced drafter vocabulary of the most frequent tokens.

A token outside the drafter's vocabulary can never be drafted. So a position's acceptance is at most the share that is covered.
In return the output matrix has fewer rows (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ENOUGH = 0.99  # share of the supervised tokens that a recommended vocabulary covers
STEP = 64  # sizes are multiples of this, for efficient matrix products


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """How many supervised tokens the most frequent ones cover."""

    vocabulary: int  # size of the target's vocabulary
    seen: int  # number of distinct supervised tokens
    curve: list[tuple[int, float]]  # (size, share of supervised tokens that the `size` most frequent ones cover)
    recommended: int  # smallest multiple of `STEP` that covers `ENOUGH`, at most the whole vocabulary
    recommended_share: float
    covered_V: Tensor

    def share(self, size: int) -> float:
        """Share of the supervised tokens that the `size` most frequent ones cover."""
        return float(self.covered_V[min(size, self.vocabulary) - 1])

    def as_dict(self) -> dict[str, Any]:
        """The figures for a report."""
        names = ("vocabulary", "seen", "recommended", "recommended_share")
        return {name: getattr(self, name) for name in names} | {"curve": [list(point) for point in self.curve]}


def coverage(counts_V: Tensor) -> Coverage | None:
    """The coverage for these counts per token (`token_counts`); None if all are 0."""
    vocabulary, total = len(counts_V), int(counts_V.sum())
    if not total:
        return None
    covered_V = counts_V.sort(descending=True).values.cumsum(0).double() / total
    sizes = [size for size in (2**exponent for exponent in range(6, 30)) if size < vocabulary] + [vocabulary]
    needed_tokens = int(torch.searchsorted(covered_V, torch.tensor(ENOUGH, dtype=torch.float64))) + 1
    recommended = min(-(-needed_tokens // STEP) * STEP, vocabulary)
    curve = [(size, float(covered_V[size - 1])) for size in sizes]
    return Coverage(vocabulary, int((counts_V > 0).sum()), curve, recommended, float(covered_V[recommended - 1]), covered_V)
