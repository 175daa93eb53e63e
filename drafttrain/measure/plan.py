"""The time budget: what is measured in full, what is cut, and the sentence that says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

LEAST_PROMPTS = 40  # acceptance rests on so many, whatever the budget (or on all, when there are fewer)
ACCEPTANCE_SHARE = 0.5  # of the budget at most, when there are more


@dataclass
class Budget:
    """Seconds for the whole measurement. `notes` collects what was cut or left out, for the report."""

    seconds: float
    began: float = field(default_factory=monotonic)
    notes: list[str] = field(default_factory=list)

    @property
    def used(self) -> float:
        return monotonic() - self.began

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.used)

    def enough(self, done: int, seconds_so_far: float, passes: int) -> bool:
        """True when the acceptance prompts should end at `done`: `passes` such passes in all would exceed their share."""
        return done >= LEAST_PROMPTS and seconds_so_far * passes > ACCEPTANCE_SHARE * self.seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """How many waves are timed, how often."""

    waves: int
    repeats: int


def plan(seconds_per_wave: float, seconds: float, waves: int, repeats: int) -> Plan:
    """As many of the wanted waves and repeats as fit; waves go first, then repeats, never below one of each.

    round_seconds: all contenders once over one wave.
    """
    rounds = max(1, int(seconds / seconds_per_wave)) if seconds_per_wave > 0 else waves * repeats
    if rounds >= waves * repeats:
        return Plan(waves, repeats)
    return Plan(max(1, min(waves, rounds // repeats)), min(repeats, rounds))
