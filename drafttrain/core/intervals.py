"""95 % intervals of pooled figures, by the delete-one jackknife: each conversation is left out once.

Shapes: C conversations (or prompts), F figures of a conversation that are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

Interval = tuple[float, float]  # low, high

LEVEL = 0.95


@lru_cache(1024)
def t_quantile(degrees: int) -> float:
    """The bound that |t| stays below with probability `LEVEL`: 12.706 for 1 degree of freedom, 1.960 for many.

    P(|t| > x) is the regularised incomplete beta function of n / (n + x^2) at (n / 2, 1 / 2) (Abramowitz and Stegun 26.7.1).
    """
    from mpmath import betainc, findroot

    def missed(x: float) -> float:
        return betainc(degrees / 2, 0.5, 0, degrees / (degrees + x * x), regularized=True) - (1 - LEVEL)

    normal = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    estimate = normal + (normal**3 + normal) / (4 * degrees)  # the first term of its expansion, 26.7.5
    return float(findroot(missed, (estimate, 1.01 * estimate)))


def jackknife(figure: Callable[[Tensor], Tensor], sum_CF: Tensor) -> Interval | None:
    """The interval of a pooled figure, by Student's t with C - 1 degrees of freedom; None below two conversations.

    figure: maps [..., F] sums to [...] values, mostly a ratio of two sums. Positions of one conversation are not
    independent, so whole conversations are left out.
    """
    C = len(sum_CF)
    if C < 2:
        return None
    total_F = sum_CF.sum(0)
    value, without_C = float(figure(total_F)), figure(total_F - sum_CF)
    variance = (C - 1) / C * float(((without_C - without_C.mean()) ** 2).sum())
    half = t_quantile(C - 1) * variance**0.5
    return value - half, value + half


def added_by(names: Sequence[Hashable], sum_CF: Tensor) -> Tensor:
    """[names, F]: rows with the same name added up, for example the turns of one dialogue."""
    row_index: dict[Hashable, int] = {}
    row_C = torch.tensor([row_index.setdefault(name, len(row_index)) for name in names], dtype=torch.long)
    return sum_CF.new_zeros(len(row_index), sum_CF.shape[1]).index_add_(0, row_C, sum_CF)


def accepted_length(sum_F: Tensor) -> Tensor:
    """1 + accepted drafts / decode steps, from [..., 2] sums of the two."""
    return 1.0 + sum_F[..., 0] / sum_F[..., 1]


def tau_interval(sum_C2: Tensor) -> Interval | None:
    """The interval of the mean accepted length, never below 1. sum_C2: accepted drafts and steps of each conversation."""
    interval = jackknife(accepted_length, sum_C2[sum_C2[:, 1] > 0])
    return None if interval is None else (max(1.0, interval[0]), max(1.0, interval[1]))


def with_interval(value: float, interval: Interval | None) -> str:
    """The figure with its interval as text: `1.52 (1.38 to 1.66)`."""
    return f"{value:.2f}" + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})")
