"""Ranks the rows of a comparison, tests their differences, and finds the frontier of speed against training cost."""

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
    """Ranked rows and the tests of their differences."""

    rows: list[Row]  # best first
    sort: str
    tested: str  # the figure of the verdicts in the table: speedup or tau
    pairs: list[Pair]  # of both figures
    tau_intervals: list[Interval | None]  # 95 %, one per row
    cost: str  # kind of training cost in the plot
    level: float
    notes: list[str]

    def against_first(self, i: int) -> str:
        """The verdict on row i compared with the first row."""
        if i == 0:
            return "-"
        pair = next(p for p in self.pairs if (p.figure, p.first, p.second) == (self.tested, 0, i))
        return pair.verdict(self.level)

    def points(self) -> list[tuple[int, float, float]]:
        """(row, cost, speedup) of the rows that have both."""
        found = [(i, row.cost(self.cost), row.entry["speedup"]) for i, row in enumerate(self.rows)]
        return [(i, cost, speed) for i, cost, speed in found if cost is not None and speed is not None]

    @property
    def frontier(self) -> frozenset[int]:
        """The rows that no other row dominates in speed and training cost."""
        return frontier(self.points())


def ranked(rows: Sequence[Row], options: CompareOptions, notes: Sequence[str] = ()) -> Comparison:
    """Rank and test the rows.

    Raises UserError for bad options, and for rows measured under different conditions, unless `mixed`.
    """
    check_options(options)
    kind = options.cost
    if kind == "auto":
        kind = next((kind for kind in KINDS if all(row.cost(kind) is not None for row in rows)), TOKENS)
    ordered = sorted(rows, key=_order(options.sort, kind))
    tested = "tau" if options.sort in ("tau", "alpha") else "speedup"
    pairs = [pair for figure in (speedup, tau) for pair in all_pairs(ordered, figure, options.samples, options.seed)]
    intervals = [interval(row, tau, options.samples, options.seed) for row in ordered]
    every_note = [*notes, *check_alike(rows, options.mixed), *_untested(ordered, pairs)]
    return Comparison(ordered, options.sort, tested, pairs, intervals, kind, options.level, every_note)


def check_options(options: CompareOptions) -> None:
    """Raise UserError for options out of range."""
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
    """Of (row, cost, speed): the rows that no other dominates. One dominates if it is no worse in both and better in one."""

    def is_dominated(cost: float, speed: float) -> bool:
        return any(c <= cost and s >= speed and (c < cost or s > speed) for _, c, s in points)

    return frozenset(i for i, cost, speed in points if not is_dominated(cost, speed))


def _untested(rows: Sequence[Row], pairs: Sequence[Pair]) -> list[str]:
    """Notes on differences that could not be tested, with the reason."""
    without = {i for i, row in enumerate(rows) if row.counts() is None}
    labels = ", ".join(rows[i].label for i in sorted(without))
    notes = [f"not tested, because the report (of an old version) has no figures by prompt: {labels}"] if without else []
    few = {pair.figure: pair.prompts for pair in pairs if pair.reason and not {pair.first, pair.second} & without}
    return notes + [f"{figure} not tested: too few prompts in common ({count})" for figure, count in few.items()]


SORTS = ("speedup", "tau", "alpha", "tokens_per_s", "parameters", "cost", "name")


def _order(sort: str, kind: str) -> Callable[[Row], tuple[bool, float | str]]:
    """The sort key: best first, unknown values last."""

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
