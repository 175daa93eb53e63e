"""A measured checkpoint as the starting point of a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.measure.simulate.formulas import expected_tokens, speedup


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
