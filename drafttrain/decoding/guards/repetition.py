"""Runs of one n-gram repeated back to back, in tokens or in characters; and what is called a loop."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_REPEATS = 3
LONGEST_PERIOD = 32  # n-grams up to this length are looked for
LEAST_TOKENS = 16  # shorter repetition is ordinary text
REACH = LEAST_REPEATS * LONGEST_PERIOD  # a loop shows in so many last tokens


def tail_run(items: Sequence[object], n: int) -> int:
    """Items in the run of one n-gram that ends the sequence; 0 where it is repeated fewer than three times.

    Example: `c a b a b a b` ends in three times `a b`, 6 items.
    """
    equal = 0
    while equal + n < len(items) and items[-1 - equal] == items[-1 - equal - n]:
        equal += 1
    return whole_run(equal, n)


def loops(tokens: Sequence[int]) -> bool:
    """The tail repeats one n-gram of at most 32 tokens at least three times, over at least 16 tokens."""
    tail = tokens[-REACH:]
    return any(tail_run(tail, n) >= LEAST_TOKENS for n in range(1, LONGEST_PERIOD + 1))


def whole_run(equal: int, n: int) -> int:
    """`equal` items that agree with those n earlier make a run of equal + n items, if it repeats often enough."""
    run = equal + n
    return run if equal and run // n >= LEAST_REPEATS else 0
