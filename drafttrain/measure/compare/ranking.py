"""Ranks the rows of a comparison, tests their differences, and finds the frontier of speed against training cost.

Only measurements under the same conditions are ranked. Shapes: P prompts, C figures of a prompt that add up, R resamplings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drafttrain.core.errors import UserError
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.measure import DecodeOptions
from drafttrain.measure.compare import CompareOptions
from drafttrain.measure.compare.runs import FLOPS, HOURS, TOKENS, Row

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
    """Every pair of rows: a paired permutation test over prompts, a bootstrap interval, and p corrected by Holm."""
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


KINDS = (FLOPS, HOURS, TOKENS)
UNITS = {FLOPS: "floating-point operations", HOURS: "hours of all processes", TOKENS: "tokens read"}
SETTINGS = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "max_new_tokens",
    "min_new_tokens",
    "stop",
)
SOFTWARE = ("drafttrain", "torch", "transformers")


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
        costs_and_speeds = [(i, row.cost(self.cost), row.entry["speedup"]) for i, row in enumerate(self.rows)]
        return [(i, cost, speed) for i, cost, speed in costs_and_speeds if cost is not None and speed is not None]

    @property
    def frontier(self) -> frozenset[int]:
        """The rows that no other row dominates in speed and training cost."""
        return frontier(self.points())


def ranked(rows: Sequence[Row], options: CompareOptions, notes: Sequence[str] = ()) -> Comparison:
    """Rank and test the rows.

    Raises UserError for bad options, and for rows measured under different conditions, unless `mixed`.
    """
    cost_kind = options.cost
    if cost_kind == "auto":
        cost_kind = next((cost_kind for cost_kind in KINDS if all(row.cost(cost_kind) is not None for row in rows)), TOKENS)
    ordered = sorted(rows, key=_order(options.sort, cost_kind))
    tested = "tau" if options.sort in ("tau", "alpha") else "speedup"
    pairs = [pair for figure in (speedup, tau) for pair in all_pairs(ordered, figure, options.samples, options.seed)]
    intervals = [interval(row, tau, options.samples, options.seed) for row in ordered]
    all_notes = [*notes, *check_alike(rows, options.mixed), *_untested(ordered, pairs)]
    return Comparison(ordered, options.sort, tested, pairs, intervals, cost_kind, options.level, all_notes)


def frontier(points: Sequence[tuple[int, float, float]]) -> frozenset[int]:
    """Of (row, cost, speed): the rows that no other dominates. One dominates if it is no worse in both and better in one."""

    def is_dominated(cost: float, speed: float) -> bool:
        return any(c <= cost and s >= speed and (c < cost or s > speed) for _, c, s in points)

    return frozenset(i for i, cost, speed in points if not is_dominated(cost, speed))


def _untested(rows: Sequence[Row], pairs: Sequence[Pair]) -> list[str]:
    """Notes on differences that could not be tested, with the reason."""
    uncounted = {i for i, row in enumerate(rows) if row.counts() is None}
    labels = ", ".join(rows[i].label for i in sorted(uncounted))
    notes = [f"not tested, because the report (of an old version) has no figures by prompt: {labels}"] if uncounted else []
    prompts_by_figure = {
        pair.figure: pair.prompts for pair in pairs if pair.reason and not {pair.first, pair.second} & uncounted
    }
    return notes + [f"{figure} not tested: too few prompts in common ({count})" for figure, count in prompts_by_figure.items()]


def _order(sort: str, cost_kind: str) -> Callable[[Row], tuple[bool, float | str]]:
    """The sort key: best first, unknown values last."""

    def key(row: Row) -> tuple[bool, float | str]:
        if sort == "name":
            return False, row.label
        if sort == "cost":
            cost = row.cost(cost_kind)
            return cost is None, cost or 0.0
        value = row.entry.get(sort)
        sign = 1.0 if sort == "parameters" else -1.0
        return value is None, sign * float(value or 0.0)

    return key


def conditions(row: Row, digests: bool) -> dict[str, Any]:
    """The conditions of a measurement, apart from the drafter. digests: identify prompts by their tokens, not by their file."""
    report, entry = row.run.report, row.entry
    target, environment, measure = report["target"], report["environment"], report["measure"]
    setup = {
        "target": target.get("fingerprint") or target.get("path") or target.get("name"),
        "target's dtype": target.get("dtype"),
        "runner": target.get("runner"),
        "prompts": _prompts(row) if digests else f"{measure['prompts']} ({entry['prompts']})",
        "policy": entry["policy"],
        "temperature": entry["temperature"],
        "batch size": entry["batch_size"],
    }
    if (policy := POLICIES.get(entry["policy"])) is not None and policy.parameter is not None:
        setup[policy.parameter] = measure["decode"].get(policy.parameter)
    guard = measure["decode"].get("guard") or {}
    if acting := {name: guard[name] for name in ("loop", "json") if guard.get(name, "off") != "off"}:
        setup["guards"] = acting
    return (
        setup
        | _hardware(environment)
        | {
            key: measure["decode"].get(key, getattr(DecodeOptions, key, None))  # older reports have fewer
            for key in SETTINGS
        }
    )


def differences(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The conditions that the rows do not share, each with its values."""
    digests = all(row.counts() is not None for row in rows)
    setups = [conditions(row, digests) for row in rows]
    names = dict.fromkeys(name for setup in setups for name in setup)
    values = {name: list({str(setup.get(name)): setup.get(name) for setup in setups}.values()) for name in names}
    return {name: distinct for name, distinct in values.items() if len(distinct) > 1}


def listed(different: dict[str, list[Any]]) -> str:
    """`policy (greedy; lossless), batch size (1; 4)`."""
    return ", ".join(f"{name} ({'; '.join(map(str, values))})" for name, values in different.items())


def check_alike(rows: Sequence[Row], mixed: bool) -> list[str]:
    """Notes on different conditions. Raises UserError for rows measured under different conditions, unless `mixed`."""
    different = differences(rows)
    if different and not mixed:
        raise UserError(
            f"the runs were measured under different conditions and cannot be ranked; they differ in {listed(different)}; "
            "measure them under the same conditions (see each run's report.json), or set compare.mixed=true"
        )
    notes = [f"measured under different conditions, so ranks mean little: {listed(different)}"] if different else []
    versions = {name: list(dict.fromkeys(str(r.run.report["environment"].get(name)) for r in rows)) for name in SOFTWARE}
    if mixed_versions := {name: distinct for name, distinct in versions.items() if len(distinct) > 1}:
        notes.append(f"measured with different versions: {listed(mixed_versions)}")
    return notes


def _hardware(environment: dict[str, Any]) -> dict[str, Any]:
    """The GPU's name; on a CPU the processor, cores and threads. Reports of version 1 do not name the processor."""
    if environment.get("accelerator"):
        return {"hardware": environment["accelerator"]}
    parts = [environment.get(key) for key in ("processor", "machine")]
    name = next((p for p in parts if p), environment.get("device"))
    return {"hardware": name, "cores": environment.get("cores"), "threads": environment.get("threads")}


def _prompts(row: Row) -> str:
    counts = row.counts() or {}
    digest = hashlib.sha256("\n".join(sorted(counts)).encode()).hexdigest()[:8]
    return f"{row.run.report['measure']['prompts']}, {len(counts)} of digest {digest}"
