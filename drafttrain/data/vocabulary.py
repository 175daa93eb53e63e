"""How large a drafter's vocabulary pays: how many of the supervised tokens its commonest ones cover.

A token that the drafter lacks can never be drafted, so that a position's acceptance is at most the share covered; what is
saved is the output matrix's rows (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ENOUGH = 0.99  # of the supervised tokens
STEP = 64  # sizes that matrix products like


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """curve: (size, share of all supervised tokens that the commonest `size` are). seen: tokens that occur at all.

    recommended: the least size, a multiple of `STEP`, that covers `ENOUGH`; the whole vocabulary where that is no smaller.
    """

    vocabulary: int
    seen: int
    curve: list[tuple[int, float]]
    recommended: int
    recommended_share: float
    covered_V: Tensor

    def share(self, size: int) -> float:
        """Of the supervised tokens that the commonest `size` cover."""
        return float(self.covered_V[min(size, self.vocabulary) - 1])

    def as_dict(self) -> dict[str, Any]:
        """What a report says."""
        names = ("vocabulary", "seen", "recommended", "recommended_share")
        return {name: getattr(self, name) for name in names} | {"curve": [list(point) for point in self.curve]}


def coverage(counts_V: Tensor) -> Coverage | None:
    """Of these counts per token (`token_counts`); None where none is counted."""
    vocabulary, total = len(counts_V), int(counts_V.sum())
    if not total:
        return None
    covered_V = counts_V.sort(descending=True).values.cumsum(0).double() / total
    sizes = [size for size in (2**power for power in range(6, 30)) if size < vocabulary] + [vocabulary]
    needed = int(torch.searchsorted(covered_V, torch.tensor(ENOUGH, dtype=torch.float64))) + 1
    recommended = min(-(-needed // STEP) * STEP, vocabulary)
    curve = [(size, float(covered_V[size - 1])) for size in sizes]
    return Coverage(vocabulary, int((counts_V > 0).sum()), curve, recommended, float(covered_V[recommended - 1]), covered_V)
