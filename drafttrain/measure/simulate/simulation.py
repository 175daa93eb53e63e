"""Runs a simulation from the options and, if one is given, a report, whose measured checkpoint is the starting point."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.measure.simulate import SimulateOptions
from drafttrain.measure.simulate.formulas import Ranks, best_tree, expected_tokens, full_tree, geometric_ranks, shifted, speedup
from drafttrain.measure.simulate.scenario import Experts, Scenario, Shape, StepCosts, Trial, sampled_chain, tree_trial

ASSUMED = {"alpha": 0.7, "draft": 0.05, "token": 0.01, "other": 0.0}
WIDE = 10  # ranks of a tree's level without a report


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one checkpoint in a report. Costs are in plain decode steps."""

    name: str
    tau: float
    speedup: float
    alpha_K: tuple[float, ...]  # P(k drafts accepted | k - 1 accepted); 1 + the sum of the running products is tau
    ranks: list[list[float]] | None
    draft: float  # all draft passes of a decode step
    verify: float  # a verification of `nodes`
    other: float  # the rest of a decode step
    nodes: float  # verified nodes, root included
    token: float  # each further token in the target's pass
    speedups: dict[int, float] = field(default_factory=dict)  # as measured, by batch size

    @staticmethod
    def of(name: str, entry: dict[str, Any]) -> Measured:
        """Read a checkpoint's entry in a report. Raises UserError where nothing was drafted or timed."""
        required_keys = ("alpha_by_position", "tau", "speedup", "draft_cost", "verify_cost")
        if missing := [key for key in required_keys if entry.get(key) in (None, [])]:
            raise UserError(
                f"{name}: report.json has no {', '.join(missing)}; name a report of a drafter that drafted and was timed"
            )
        plain = entry["plain_step_ms"]
        return Measured(
            name=name,
            tau=entry["tau"],
            speedup=entry["speedup"],
            alpha_K=_acceptance(entry),
            ranks=entry.get("rank_by_position"),
            draft=entry["draft_cost"],
            verify=entry["verify_cost"],
            other=(entry["commit_ms"] + entry["host_ms"]) / plain,
            nodes=entry["verify_nodes"],
            token=token_cost(entry),
            speedups={s["value"]: s["speedup"] for s in entry["slices"] if s["by"] == "batch_size" and s.get("speedup")},
        )

    @property
    def chain_K(self) -> tuple[float, ...]:
        """alpha_K of a chain of first choices; that of the measured tree if the report does not show the chain's."""
        if self.ranks is None or self.nodes - 1.0 <= len(self.alpha_K):
            return self.alpha_K
        return tuple(row[0] for row in self.ranks)

    def expected(self, alpha_K: tuple[float, ...] | None = None) -> tuple[float, float]:
        """(tokens, speedup) by formula for the measured settings. alpha_K: instead of the measured acceptance."""
        tokens = expected_tokens(alpha_K or self.alpha_K)
        return tokens, speedup(tokens, self.draft, self.verify, self.other)


def _acceptance(entry: dict[str, Any]) -> tuple[float, ...]:
    """alpha_K from the counts. Reports of version 1 have only accepted / offered, which leaves out where a tree's paths end."""
    if "accepted_by_position" not in entry:
        return tuple(a[0] for a in entry["alpha_by_position"])
    counts_by_depth = [entry["verifications"], *entry["accepted_by_position"]]
    return tuple(deeper / shallower for shallower, deeper in pairwise(counts_by_depth) if shallower)


def token_cost(entry: dict[str, Any]) -> float:
    """The cost of each further token in a target pass, in plain steps of one token; at least 0.

    It is the slope of a least-squares line of milliseconds by tokens: B tokens in a plain step, B * nodes in a verification.
    """
    points: list[tuple[float, float]] = []
    for batch_slice in [s for s in entry["slices"] if s["by"] == "batch_size" and s.get("plain_step_ms")] or [entry]:
        batch = batch_slice["batch_size"]
        points += [(batch, batch_slice["plain_step_ms"]), (batch * batch_slice["verify_nodes"], batch_slice["verify_ms"])]
    tokens, milliseconds = zip(*points, strict=True)
    slope, intercept = linear_regression(tokens, milliseconds) if len(set(tokens)) > 1 else (0.0, fmean(milliseconds))
    at_one = intercept + slope
    return max(0.0, slope / at_one) if at_one > 0 else slope / min(milliseconds)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The results of a simulation."""

    scenario: Scenario
    measured: Measured | None
    requested_alpha: float | None  # `simulate.alpha`
    change: float | None  # `simulate.alpha`, if it is a change of the report's acceptance
    chains: list[Shape]
    trees: list[Shape]  # the best chain, W-ary tree and static tree
    static_trees: list[Shape]
    batches: dict[int, Shape]  # the best chain at each batch size
    break_even_draft_cost: float | None
    break_even_alpha: float | None
    break_even_batch: int | None
    trials: list[Trial]

    @property
    def requested_alpha_K(self) -> tuple[float, ...]:
        """Acceptance by position of the measured proposal, with the requested value or change."""
        if self.measured is None or self.requested_alpha is None:
            return self.measured.alpha_K if self.measured else self.scenario.alpha_K
        if self.change is None:
            return (self.requested_alpha,) * len(self.measured.alpha_K)
        return tuple(shifted(self.measured.alpha_K, self.change))

    @property
    def lengths_by_batch(self) -> dict[int, int]:
        """The best draft length from each batch size on at which it changes; 0: plain decoding is faster."""
        best = {size: shape.depth if shape.speedup > 1.0 else 0 for size, shape in sorted(self.batches.items())}
        return {
            size: length
            for (size, length), before in zip(best.items(), [None, *best.values()], strict=False)
            if length != before
        }

    def plain(self) -> dict[str, Any]:
        """The results as plain values, for a JSON file."""
        break_even = {name: getattr(self, f"break_even_{name}") for name in ("draft_cost", "alpha", "batch")}
        what_if = None
        if self.measured is not None:
            current, changed = self.measured.expected(), self.measured.expected(self.requested_alpha_K)
            what_if = {"now": dict(zip(("tau", "speedup"), current, strict=True))}
            what_if |= {"then": dict(zip(("tau", "speedup"), changed, strict=True))}
        return {
            "alpha": list(self.scenario.alpha_K),
            "costs": asdict(self.scenario.costs),
            "chains": [asdict(shape) for shape in self.chains],
            "trees": [asdict(shape) for shape in self.trees],
            "static_trees": [asdict(shape) for shape in self.static_trees],
            "lengths_by_batch": {str(size): length for size, length in self.lengths_by_batch.items()},
            "batches": {str(size): asdict(shape) for size, shape in self.batches.items()},
            "break_even": break_even,
            "measured": None if self.measured is None else asdict(self.measured),
            "what_if": what_if,
            "trials": [asdict(trial) | {"agrees": trial.agrees} for trial in self.trials],
        }


def run_simulation(options: SimulateOptions, measured: Measured | None = None) -> Simulation:
    """Run a simulation. measured: the report's checkpoint to start from. Raises UserError for options out of range."""
    check(options)
    scenario, change = scenario_of(options, measured)
    trees = [scenario.best_chain()]
    if (full := scenario.best_full_tree(options.width, options.nodes)) is not None:
        trees.append(full)
    static = scenario.static_trees(options.nodes)
    trees += [max(static, key=lambda shape: shape.speedup)] if static else []
    return Simulation(
        scenario=scenario,
        measured=measured,
        requested_alpha=alpha_of(options.alpha)[0],
        change=change,
        chains=[scenario.chain(K) for K in options.lengths],
        trees=trees,
        static_trees=static,
        batches={size: scenario.best_chain(size) for size in options.batch_sizes},
        break_even_draft_cost=scenario.break_even_draft_cost(),
        break_even_alpha=scenario.break_even_alpha(),
        break_even_batch=scenario.break_even_batch(),
        trials=trials_of(scenario, options),
    )


def scenario_of(options: SimulateOptions, measured: Measured | None) -> tuple[Scenario, float | None]:
    """The scenario, and the requested change of alpha if there is one."""
    alpha_K = measured.chain_K if measured else (ASSUMED["alpha"],)
    value, relative = alpha_of(options.alpha)
    if relative and measured is None:
        raise UserError(
            f"simulate.alpha is {options.alpha}, a change, but there is no report to change; name one with report=FILE or "
            "checkpoint=DIR, or set an acceptance as simulate.alpha=0.75"
        )
    if value is not None:
        alpha_K = tuple(shifted(alpha_K, value)) if relative else (value,)
    base_costs = StepCosts(
        draft=ASSUMED["draft"] if measured is None else measured.draft / (1 if options.parallel else len(measured.alpha_K)),
        token=ASSUMED["token"] if measured is None else measured.token,
        other=ASSUMED["other"] if measured is None else measured.other,
    )
    overrides = {"draft": options.draft_cost, "token": options.token_cost, "other": options.other_cost}
    costs = replace(
        base_costs,
        **{k: v for k, v in overrides.items() if v is not None},
        parallel=options.parallel,
        experts=experts_of(options),
    )
    ranks = _ranks(options, measured, alpha_K, value if relative else None)
    return Scenario(alpha_K, ranks, costs, options.lengths), value if relative else None


def experts_of(options: SimulateOptions) -> Experts | None:
    """The target's experts, if the options describe some."""
    if not options.experts:
        return None
    return Experts(options.experts, options.experts_per_token, options.expert_share)


def alpha_of(text: str | None) -> tuple[float | None, bool]:
    """(value, whether it is a change): 0.8 is (0.8, False), +0.05 is (0.05, True). Raises UserError for anything else."""
    if text is None:
        return None, False
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", text) or not -1.0 <= float(text) <= 1.0:
        raise UserError(f"simulate.alpha is {text!r}; set an acceptance as 0.8, or a change as +0.05 or -0.05")
    return float(text), text[0] in "+-"


def check(options: SimulateOptions) -> None:
    """Raise UserError for options that do not fit each other."""
    if options.experts and not 1 <= options.experts_per_token <= options.experts:
        raise UserError(
            f"simulate.experts_per_token is {options.experts_per_token}; give how many of a layer's {options.experts} experts "
            "a token is sent to"
        )
    if options.experts and not 0.0 < options.expert_share < 1.0:
        raise UserError(
            f"simulate.expert_share is {options.expert_share}; give the routed experts' share of the weights that a plain step "
            "of one token reads, within 0 and 1"
        )
    if not options.experts and (options.experts_per_token or options.expert_share):
        raise UserError(f"simulate.experts is {options.experts}; give a layer's experts, or 0 for a dense target")
    for name in ("lengths", "batch_sizes"):
        if not getattr(options, name):
            raise UserError(f"simulate.{name} is empty; give one or more numbers")


def trials_of(scenario: Scenario, options: SimulateOptions) -> list[Trial]:
    """Simulations of accept/reject: a sampled chain, and a static tree under every lossless policy."""
    K, nodes = min(5, max(options.lengths)), min(15, options.nodes)
    alpha_K = [*scenario.alpha_K, *[scenario.alpha_K[-1]] * K][:K]
    trials = [sampled_chain(alpha_K, options.trials, options.seed)]
    paths = best_tree(scenario.ranks, nodes) or full_tree(1, 1)
    return trials + [
        tree_trial(policy, scenario.ranks, paths, options.trials, options.seed) for policy in ("greedy", "lossless", "coupled")
    ]


def _ranks(options: SimulateOptions, measured: Measured | None, alpha_K: Sequence[float], change: float | None) -> Ranks:
    """Ranks for trees: from the options, from the report, or from alpha alone (`geometric_ranks`)."""
    if options.ranks is not None:
        return _checked(options.ranks)
    if measured is None or measured.ranks is None or (options.alpha is not None and change is None):
        depth = max(options.lengths)
        alpha_by_depth = [*alpha_K, *[alpha_K[-1]] * depth][:depth]
        return [geometric_ranks(alpha, WIDE, 1)[0] for alpha in alpha_by_depth]
    return [_raised(row, change or 0.0) for row in measured.ranks]


def _raised(row: Sequence[float], change: float) -> list[float]:
    """A row of ranks with the first choice changed by `change`. The others shrink where the row would exceed 1."""
    first, remainder = min(1.0, max(0.0, row[0] + change)), sum(row[1:])
    scale = min(1.0, (1.0 - first) / remainder) if remainder else 1.0
    return [first, *(share * scale for share in row[1:])]


def _checked(ranks: Any) -> Ranks:
    rows = ranks if isinstance(ranks, list) and ranks else None
    is_valid = rows is not None and all(
        isinstance(row, list) and row and all(isinstance(x, int | float) and x >= 0 for x in row) and sum(row) <= 1.0 + 1e-9
        for row in rows
    )
    if not is_valid:
        raise UserError(
            f"simulate.ranks is {ranks}; give the shares of the ranks for each depth, at most 1 in sum: [[0.6, 0.2], [0.5]]"
        )
    return [[float(x) for x in row] for row in ranks]
