"""Acceptance figures. Counts are pooled over all steps of all prompts; there are no means of means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafttrain.decoding.request import Result

Interval = tuple[float, float, float]  # value, low, high

_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of many requests, added up."""

    verifications: int
    emitted: int  # tokens
    nodes: int  # drafted nodes verified
    offered: tuple[int, ...]  # [i]: drafts at depth i + 1 below an accepted path
    accepted: tuple[int, ...]  # [i]: accepted drafts at depth i + 1

    @property
    def tau(self) -> float | None:
        """Mean accepted length, including the bonus token; None when nothing was verified."""
        return self.emitted / self.verifications if self.verifications else None

    @property
    def alpha(self) -> float | None:
        """Acceptance rate: accepted / offered drafts, over all positions; None when nothing was offered."""
        return sum(self.accepted) / sum(self.offered) if sum(self.offered) else None

    @property
    def alpha_by_position(self) -> list[Interval]:
        """P(position i accepted | the earlier positions accepted), i from 1, each with its 95 % interval."""
        return [wilson(hits, trials) for hits, trials in zip(self.accepted, self.offered, strict=True) if trials]

    @property
    def rejection_overhead(self) -> float | None:
        """Share of the verified draft nodes that were rejected; None when nothing was verified."""
        return 1.0 - sum(self.accepted) / self.nodes if self.nodes else None


def pooled(results: Iterable[Result]) -> Acceptance:
    """Add up the counts of many requests."""
    results = list(results)
    return Acceptance(
        verifications=sum(r.verifications for r in results),
        emitted=sum(r.emitted for r in results),
        nodes=sum(r.nodes for r in results),
        offered=_add_up([r.offered for r in results]),
        accepted=_add_up([r.accepted for r in results], [r.offered for r in results]),
    )


def chain_alphas(steps: int, accepted: Sequence[int]) -> list[Interval]:
    """Acceptance by position of whole chains, from decode steps and the accepted drafts by position.

    Every step offers the first draft. A later one is offered where the one before it was accepted.
    """
    return [wilson(hits, trials) for hits, trials in zip(accepted, (steps, *accepted), strict=False) if trials]


def wilson(hits: int, trials: int) -> Interval:
    """A share with its 95 % binomial interval (Wilson's score interval, which stays within [0, 1])."""
    if trials <= 0 or not 0 <= hits <= trials:
        raise ValueError(f"{hits} hits in {trials} trials; give at least one trial and no more hits than trials")
    share, z2 = hits / trials, _Z95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))


def _add_up(counts: Sequence[Sequence[int]], as_long_as: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Column sums of ragged rows, padded with zeros to the longest row of both arguments."""
    longest = max((len(c) for c in (*counts, *as_long_as)), default=0)
    return tuple(sum(c[i] for c in counts if i < len(c)) for i in range(longest))
