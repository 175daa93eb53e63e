"""Runs of one n-gram repeated back to back, in tokens or in characters."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_REPEATS = 3


def tail_run(items: Sequence[object], n: int) -> int:
    """Items in the run of one n-gram that ends the sequence; 0 where it is repeated fewer than three times.

    Example: `c a b a b a b` ends in three times `a b`, 6 items.
    """
    equal = 0
    while equal + n < len(items) and items[-1 - equal] == items[-1 - equal - n]:
        equal += 1
    return whole_run(equal, n)


def whole_run(equal: int, n: int) -> int:
    """`equal` items that agree with those n earlier make a run of equal + n items, if it repeats often enough."""
    run = equal + n
    return run if equal and run // n >= LEAST_REPEATS else 0
