"""Cases of a product of which a few are told apart from the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def with_grid(few: Sequence[tuple[Any, ...]], *values: Iterable[Any], slow: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
    """These few cases, the slow ones, and what is left of the product of the values as `grid`.

    For tests whose branches need several values at once, which `sampled` does not know.
    """
    left = (case for case in product(*values) if case not in (*few, *slow))
    return [*few, *marked(slow, pytest.mark.slow), *marked(left, pytest.mark.grid)]


def slow_but(few: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Every value of a parameter; those that are not among the few are slow."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.slow) for value in every]


def marked(cases: Iterable[tuple[Any, ...]], mark: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*case, marks=mark) for case in cases]
