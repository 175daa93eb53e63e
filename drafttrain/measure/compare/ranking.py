"""Rows in order, tested against each other, and which of them no other beats at lower cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafttrain.core.errors import UserError
from drafttrain.measure.compare import CompareOptions
from drafttrain.measure.compare.conditions import check_alike
from drafttrain.measure.compare.rows import FLOPS, HOURS, TOKENS, Row
from drafttrain.measure.compare.significance import Interval, Pair, all_pairs, interval, speedup, tau

KINDS = (FLOPS, HOURS, TOKENS)
UNITS = {FLOPS: "floating-point operations", HOURS: "hours of all processes", TOKENS: "tokens read"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """rows: best first. tested: the figure by which rows are called ahead, `speedup` or `tau`; pairs have both. tau_intervals:
    one per row, 95 %.

    cost: the kind of the plot. frontier: rows that no other equals in speed at lower cost.
    """

    rows: list[Row]
    sort: str
    tested: str
    pairs: list[Pair]
    tau_intervals: list[Interval | None]
    cost: str
    frontier: frozenset[int]
    level: float
    notes: list[str]

    def against_first(self, i: int) -> str:
        """How row i stands to the first one, in words."""
        if i == 0:
            return "-"
        pair = next(p for p in self.pairs if (p.figure, p.first, p.second) == (self.tested, 0, i))
        return pair.words(self.level)

    def points(self) -> list[tuple[int, float, float]]:
        """(row, cost, speedup) of those that have both."""
        found = [(i, row.cost(self.cost), row.entry["speedup"]) for i, row in enumerate(self.rows)]
        return [(i, cost, speed) for i, cost, speed in found if cost is not None and speed is not None]


def ranked(rows: Sequence[Row], options: CompareOptions, notes: Sequence[str] = ()) -> Comparison:
    """Raises UserError for bad options, and for rows measured under different conditions, unless `mixed`."""
    check_options(options)
    said = [*notes, *check_alike(rows, options.mixed)]
    kind = _cost_kind(rows, options.cost)
    ordered = sorted(rows, key=_order(options.sort, kind))
    tested = "tau" if options.sort in ("tau", "alpha") else "speedup"
    pairs = [pair for figure in (speedup, tau) for pair in all_pairs(ordered, figure, options.samples, options.seed)]
    said.extend(_untested(ordered, pairs))
    intervals = [interval(row, tau, options.samples, options.seed) for row in ordered]
    found = Comparison(ordered, options.sort, tested, pairs, intervals, kind, frozenset(), options.level, said)
    return Comparison(ordered, options.sort, tested, pairs, intervals, kind, frontier(found.points()), options.level, said)


def check_options(options: CompareOptions) -> None:
    if options.sort not in SORTS:
        raise UserError(f"compare.sort is {options.sort!r}; choose {', '.join(SORTS)}")
    if options.checkpoints not in ("best", "all"):
        raise UserError(f"compare.checkpoints is {options.checkpoints!r}; choose best or all")
    if options.cost not in ("auto", *KINDS):
        raise UserError(f"compare.cost is {options.cost!r}; choose auto, {', '.join(KINDS)}")
    if not 0.0 < options.level < 1.0 or options.samples < 100:
        raise UserError(
            f"compare.level is {options.level:g}, compare.samples {options.samples}; set the level above 0 and below 1, "
            "and 100 samples or more"
        )


def frontier(points: Sequence[tuple[int, float, float]]) -> frozenset[int]:
    """Of (row, cost, speed): the rows that none dominates, being at least as fast and as cheap, and better in one of both."""

    def is_dominated(cost: float, speed: float) -> bool:
        return any(c <= cost and s >= speed and (c < cost or s > speed) for _, c, s in points)

    return frozenset(i for i, cost, speed in points if not is_dominated(cost, speed))


def _untested(rows: Sequence[Row], pairs: Sequence[Pair]) -> list[str]:
    """Which differences nothing can be said of, and why."""
    without = [row.label for row in rows if row.counts() is None]
    notes = [f"not tested, for want of values by prompt (older reports): {', '.join(without)}"] if without else []
    few = {
        pair.figure: pair.prompts for pair in pairs if pair.reason and not {pair.first, pair.second} & _numbers(rows, without)
    }
    return notes + [f"{figure} not tested: too few prompts in common ({count})" for figure, count in few.items()]


def _numbers(rows: Sequence[Row], labels: Sequence[str]) -> set[int]:
    return {i for i, row in enumerate(rows) if row.label in labels}


def _cost_kind(rows: Sequence[Row], asked: str) -> str:
    if asked != "auto":
        return asked
    return next((kind for kind in KINDS if all(row.cost(kind) is not None for row in rows)), TOKENS)


SORTS = ("speedup", "tau", "alpha", "tokens_per_s", "parameters", "cost", "name")


def _order(sort: str, kind: str) -> Callable[[Row], tuple[bool, float | str]]:
    """Greatest first for what should be great, least first for what should be little; what is not known comes last."""

    def key(row: Row) -> tuple[bool, float | str]:
        if sort == "name":
            return False, row.label
        if sort == "cost":
            cost = row.cost(kind)
            return cost is None, cost or 0.0
        value = row.entry.get(sort)
        sign = 1.0 if sort == "parameters" else -1.0
        return value is None, sign * float(value or 0.0)

    return key
