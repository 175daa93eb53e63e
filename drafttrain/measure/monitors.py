"""Failure monitors: loops, missing stop tokens, broken JSON. They only count; `drafttrain.decoding.guards` acts."""

from __future__ import annotations

import json
from collections.abc import Sequence

from drafttrain.decoding.guards import LONGEST_PERIOD, JsonText, loops, whole_run

QUALITY = ("loops", "stop_misses", "longest_repeat", "json_valid")  # what is counted


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length in tokens of the longest run of one n-gram, repeated back to back at least three times; 0 when there is none.

    Example: `a b a b a b c` holds `a b` three times, 6 tokens.
    """
    return max((_longest_run(tokens, n) for n in range(1, LONGEST_PERIOD + 1)), default=0)


def ends_in_loop(tokens: Sequence[int], stop_ids: frozenset[int] = frozenset()) -> bool:
    """Whether the output's tail is a loop (`drafttrain.decoding.guards.loops`). A stopped output has none."""
    return bool(tokens) and tokens[-1] not in stop_ids and loops(tokens)


def missed_stop(tokens: Sequence[int], stop_ids: frozenset[int]) -> bool:
    """Whether the output reached its length limit without a stop token."""
    return not tokens or tokens[-1] not in stop_ids


def valid_json(text: str, required: Sequence[str] = (), fence: bool = True) -> bool:
    """Whether the text is one JSON value, with blanks and, if allowed, a ``` fence around it.

    required: keys that it must have; then it must be an object.
    """
    checker = JsonText(fence)
    if checker.feed(text) is not None or not checker.complete:
        return False
    if not required:
        return True
    try:
        value = json.loads(checker.value)
    except RecursionError:
        return False
    return isinstance(value, dict) and all(key in value for key in required)


def counted(outputs: Sequence[Sequence[int]], stop_ids: frozenset[int]) -> dict[str, int]:
    """Number of outputs that end in a loop, number without a stop token, and the longest repetition in tokens."""
    return {
        "loops": sum(ends_in_loop(o, stop_ids) for o in outputs),
        "stop_misses": sum(missed_stop(o, stop_ids) for o in outputs),
        "longest_repeat": max((longest_repeat(o) for o in outputs), default=0),
    }


def _longest_run(tokens: Sequence[int], n: int) -> int:
    best = equal = 0
    for i in range(n, len(tokens)):
        equal = equal + 1 if tokens[i] == tokens[i - n] else 0
        best = max(best, equal)
    return whole_run(best, n)
