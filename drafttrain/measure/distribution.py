"""Tests whether speculative samples have the distribution of plain sampling: a two-sample chi-square test over many seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

RARE = 10  # tokens seen less often than this in both samples together are pooled into one cell
SAMPLES = 384  # continuations per side
POSITIONS = 3  # positions compared; the first generated token is left out, because the prefill gives it
ENDED = -1  # counts as the token at positions after a stop token


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for X chi-square with `freedom` degrees of freedom."""
    if freedom <= 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def two_sample(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """p-value of both samples having one distribution: chi-square on the 2 x cells table, with rare tokens as one cell."""
    a, b = Counter(ours), Counter(theirs)
    cells: Counter[int] = Counter()
    first: Counter[int] = Counter()
    for token in a.keys() | b.keys():
        cell = token if a[token] + b[token] >= RARE else -2
        cells[cell] += a[token] + b[token]
        first[cell] += a[token]
    share = len(ours) / (len(ours) + len(theirs))
    statistic = 0.0
    for cell, total in cells.items():
        for seen, expected in ((first[cell], share * total), (total - first[cell], (1 - share) * total)):
            statistic += (seen - expected) ** 2 / expected
    return chi_square_tail(statistic, len(cells) - 1)


def p_value(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """p-value over all compared positions: the least p-value of a position times the number of positions (Bonferroni).

    ours, theirs: outputs for one prompt under independent seeds.
    """
    tested = [two_sample([_at(o, i) for o in ours], [_at(o, i) for o in theirs]) for i in range(1, POSITIONS + 1)]
    return min(1.0, len(tested) * min(tested))


def _at(output: Sequence[int], index: int) -> int:
    return output[index] if index < len(output) else ENDED
