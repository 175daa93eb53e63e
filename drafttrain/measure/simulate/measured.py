"""A measured checkpoint as a scenario's starting point."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.measure.simulate.formulas import expected_tokens, speedup


@dataclass(frozen=True, slots=True)
class Measured:
    """What a report says of one checkpoint. alpha_K: P(the path goes on | it reaches so far), leaves of a tree included, so
    that 1 + the sum of its running products is tau. draft: of a whole decode step, all passes; verify: of `nodes`, the root
    included.

    token: of each token more in the target's pass, the slope of a line through the plain steps and verifications timed.
    """

    name: str
    tau: float
    speedup: float
    alpha_K: tuple[float, ...]
    ranks: list[list[float]] | None
    draft: float
    verify: float
    other: float
    nodes: float
    token: float

    @staticmethod
    def of(name: str, entry: dict[str, Any]) -> Measured:
        """Raises UserError where nothing was drafted or timed."""
        wanted = ("alpha_by_position", "tau", "speedup", "draft_cost", "verify_cost")
        if missing := [key for key in wanted if entry.get(key) in (None, [])]:
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
        """The same for a chain of first choices, as far as the report tells it apart from the tree that was measured."""
        if self.ranks is None or self.nodes - 1.0 <= len(self.alpha_K):
            return self.alpha_K
        return tuple(row[0] for row in self.ranks)

    def expected(self, alpha_K: tuple[float, ...] | None = None) -> tuple[float, float]:
        """(tokens, speedup) by formula at the settings that were measured, with these acceptances or its own."""
        tokens = expected_tokens(alpha_K or self.alpha_K)
        return tokens, speedup(tokens, self.draft, self.verify, self.other)


def _acceptance(entry: dict[str, Any]) -> tuple[float, ...]:
    """From the counts; reports of version 1 have only shares of what was offered, which a tree's leaves do not lower."""
    if "accepted_by_position" not in entry:
        return tuple(a[0] for a in entry["alpha_by_position"])
    reached = [entry["verifications"], *entry["accepted_by_position"]]
    return tuple(then / now for now, then in pairwise(reached) if now)


def token_cost(entry: dict[str, Any]) -> float:
    """Milliseconds of a target pass against its tokens, B in a plain step and B * nodes in a verification, as a line fitted by
    least squares: its slope, in plain steps of one token. 0 at least.
    """
    points: list[tuple[float, float]] = []
    for part in [s for s in entry["slices"] if s["by"] == "batch_size" and s.get("plain_step_ms")] or [entry]:
        batch = part["batch_size"]
        points += [(batch, part["plain_step_ms"]), (batch * part["verify_nodes"], part["verify_ms"])]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    at_one = mean_y + slope * (1.0 - mean_x)
    return max(0.0, slope / at_one) if at_one > 0 else slope / min(y for _, y in points)
