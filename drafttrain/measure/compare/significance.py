"""Tests whether a difference is significant: paired permutation tests over prompts, bootstrap intervals, Holm's correction.

Shapes: P prompts, C figures of a prompt that are added up, R resamplings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from drafttrain.measure.compare.rows import Row

Array = NDArray[np.float64]
Samples = dict[str, Array]  # by prompt: [C]

EXACT = 12  # up to this many prompts, the test enumerates every permutation
LEAST = 5  # with fewer prompts, even the least possible p-value, 2 / 2^P, is not significant


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Pair:
    """The difference of two rows on the prompts that they share."""

    first: int
    second: int
    figure: str  # tau or speedup
    prompts: int  # in common
    reason: str | None = None  # why there is no test; then the fields below are None
    difference: float | None = None  # first - second
    interval: Interval | None = None  # 95 %, bootstrap
    p: float | None = None  # of a two-sided permutation test
    corrected: float | None = None  # p by Holm over all pairs

    def verdict(self, level: float) -> str:
        """The second row compared with the first: `behind (p = 0.003)`, `not distinguishable (p = 0.41)`."""
        if self.corrected is None or self.difference is None:
            return self.reason or "-"
        p = f"p = {self.corrected:.2g}" if self.corrected >= 0.001 else "p < 0.001"
        if self.corrected > level:
            return f"not distinguishable ({p})"
        return f"{'behind' if self.difference > 0 else 'ahead'} ({p})"


class Figure(Protocol):
    """A pooled figure [...] from sums over prompts [..., C]."""

    __name__: str

    def __call__(self, sums_C: Array) -> Array: ...


def tau(sums_C: Array) -> Array:
    """Emitted / verifications."""
    return np.asarray(sums_C[..., 0] / sums_C[..., 1])


def speedup(sums_C: Array) -> Array:
    """Time per token of plain decoding / time per token of speculative decoding."""
    return np.asarray((sums_C[..., 0] / sums_C[..., 1]) / (sums_C[..., 2] / sums_C[..., 3]))


def samples_of(row: Row, figure: Figure) -> Samples | None:
    """The counts or times by prompt that a figure needs."""
    return row.times() if figure is speedup else row.counts()


def interval(row: Row, figure: Figure, samples: int, seed: int) -> Interval | None:
    """The 95 % bootstrap interval of a row's figure, over its prompts; None with too few prompts."""
    by_prompt = samples_of(row, figure)
    if by_prompt is None or len(by_prompt) < LEAST:
        return None
    x_PC = np.stack(list(by_prompt.values()))
    return _percentiles(figure(_resamplings(len(x_PC), samples, seed) @ x_PC))


def all_pairs(rows: Sequence[Row], figure: Figure, samples: int, seed: int) -> list[Pair]:
    """Every pair of rows, with p-values corrected for the number of pairs."""
    pairs = [_pair(rows, i, j, figure, samples, seed) for i, j in combinations(range(len(rows)), 2)]
    return holm(pairs)


def holm(pairs: Sequence[Pair]) -> list[Pair]:
    """Holm's step-down correction: the k-th least of m p-values times m - k + 1, at least the one before, at most 1."""
    tested = sorted((pair for pair in pairs if pair.p is not None), key=lambda pair: pair.p or 0.0)
    corrected: dict[tuple[int, int], float] = {}
    running = 0.0
    for k, pair in enumerate(tested):
        running = max(running, min(1.0, (len(tested) - k) * (pair.p or 0.0)))
        corrected[pair.first, pair.second] = running
    return [replace(pair, corrected=corrected.get((pair.first, pair.second))) for pair in pairs]


def permutation_p(a_PC: Array, b_PC: Array, figure: Figure, samples: int, seed: int) -> float:
    """p-value of a two-sided test: how often swapping the rows' figures of random prompts gives a difference as large."""
    P, exact = len(a_PC), len(a_PC) <= EXACT
    if exact:
        swapped_RP = (np.arange(2**P)[:, None] >> np.arange(P)) & 1
    else:
        swapped_RP = np.random.default_rng(seed).integers(0, 2, (samples, P))
    moved_RC = swapped_RP @ (a_PC - b_PC)
    gap_R = np.abs(figure(a_PC.sum(0) - moved_RC) - figure(b_PC.sum(0) + moved_RC))
    observed = abs(float(figure(a_PC.sum(0)) - figure(b_PC.sum(0))))
    extreme = int((gap_R >= observed * (1 - 1e-9) - 1e-12).sum())
    return extreme / len(gap_R) if exact else (extreme + 1) / (len(gap_R) + 1)  # the observed order is one permutation


def _pair(rows: Sequence[Row], i: int, j: int, figure: Figure, samples: int, seed: int) -> Pair:
    ours, theirs = (samples_of(rows[k], figure) for k in (i, j))
    pair = Pair(i, j, figure.__name__, 0, "no figures by prompt")
    if ours is None or theirs is None:
        return pair
    shared = [key for key in ours if key in theirs]
    if len(shared) < LEAST:
        return replace(pair, prompts=len(shared), reason=f"too few prompts in common ({len(shared)})")
    a_PC, b_PC = (np.stack([x[key] for key in shared]) for x in (ours, theirs))
    weights_RP = _resamplings(len(shared), samples, seed)
    difference_R = figure(weights_RP @ a_PC) - figure(weights_RP @ b_PC)
    difference = float(figure(a_PC.sum(0)) - figure(b_PC.sum(0)))
    p = permutation_p(a_PC, b_PC, figure, samples, seed)
    return Pair(i, j, pair.figure, len(shared), None, difference, _percentiles(difference_R), p)


def _resamplings(P: int, samples: int, seed: int) -> Array:
    """[R, P] how often each prompt occurs in each resampling."""
    return np.random.default_rng(seed).multinomial(P, np.full(P, 1 / P), size=samples).astype(np.float64)


def _percentiles(values_R: Array) -> Interval:
    low, high = np.percentile(values_R, [2.5, 97.5])
    return Interval(float(low), float(high))
