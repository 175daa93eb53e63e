"""Do sampled tokens follow plain sampling's law? A two-sample chi-square test over many seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

RARE = 10  # tokens seen less often than this in both samples together are pooled into one cell
SAMPLES = 384  # continuations per side
POSITIONS = 3  # generated tokens compared, after the first, which the prefill gives
ENDED = -1  # stands for the tokens after a stop token


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for X chi-square with `freedom` degrees of freedom."""
    if freedom <= 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def two_sample(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """p-value that both samples of tokens come from one law (chi-square on the 2 x cells table, rare cells pooled)."""
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
    """p-value over the compared positions, each tested alone; Bonferroni: the least of them times their number.

    ours, theirs: outputs of independent seeds for one prompt.
    """
    tested = [two_sample([_at(o, i) for o in ours], [_at(o, i) for o in theirs]) for i in range(1, POSITIONS + 1)]
    return min(1.0, len(tested) * min(tested))


def _at(output: Sequence[int], index: int) -> int:
    return output[index] if index < len(output) else ENDED
