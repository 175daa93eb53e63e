"""Runs of one n-gram that repeats without gaps, in tokens or characters, and the definition of a loop."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_REPEATS = 3
LONGEST_PERIOD = 32  # longest n-gram that is searched for
LEAST_TOKENS = 16  # shorter repetition is ordinary text
REACH = LEAST_REPEATS * LONGEST_PERIOD  # number of last tokens that are enough to detect a loop


def tail_run(items: Sequence[object], n: int) -> int:
    """Length of the run of one n-gram that ends the sequence; 0 if it repeats fewer than three times.

    Example: `c a b a b a b` ends in three times `a b`, 6 items.
    """
    equal = 0
    while equal + n < len(items) and items[-1 - equal] == items[-1 - equal - n]:
        equal += 1
    return whole_run(equal, n)


def loops(tokens: Sequence[int]) -> bool:
    """Whether the tail repeats one n-gram of at most 32 tokens at least three times, over at least 16 tokens."""
    tail = tokens[-REACH:]
    return any(tail_run(tail, n) >= LEAST_TOKENS for n in range(1, LONGEST_PERIOD + 1))


def whole_run(equal: int, n: int) -> int:
    """Length of a run in which `equal` items agree with the item n earlier: equal + n, or 0 if it repeats too rarely."""
    run = equal + n
    return run if equal and run // n >= LEAST_REPEATS else 0
