"""The time budget of a measurement, and how many waves and repeats fit into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

LEAST_PROMPTS = 40  # a report's acceptance is measured on at least this many prompts, or on all when there are fewer
ACCEPTANCE_SHARE = 0.5  # largest share of the budget for acceptance on further prompts


@dataclass
class Budget:
    """The time budget of a whole measurement."""

    seconds: float
    least: int = LEAST_PROMPTS  # prompts on which acceptance is measured, whatever they take
    began: float = field(default_factory=monotonic)
    notes: list[str] = field(default_factory=list)  # for the report: what was cut or left out

    @property
    def used(self) -> float:
        return monotonic() - self.began

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.used)

    def enough(self, done: int, seconds_so_far: float, passes: int) -> bool:
        """Whether acceptance should stop after `done` prompts: `passes` such passes would exceed their share of the budget."""
        return done >= self.least and seconds_so_far * passes > ACCEPTANCE_SHARE * self.seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """How many waves of prompts to time, and how many times each."""

    waves: int
    repeats: int


def plan(seconds_per_wave: float, seconds: float, waves: int, repeats: int) -> Plan:
    """As many of the wanted waves and repeats as fit into `seconds`. Waves are cut first, then repeats; one of each remains.

    seconds_per_wave: all contenders once over one wave.
    """
    passes = max(1, int(seconds / seconds_per_wave)) if seconds_per_wave > 0 else waves * repeats
    if passes >= waves * repeats:
        return Plan(waves, repeats)
    return Plan(max(1, min(waves, passes // repeats)), min(repeats, passes))
