"""One case of a suite: its work, the sources that it depends on, and the checks without which its figures mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.sources import SCOPES

Key = tuple[str, str]  # (section, name)


class RedError(Exception):
    """What was run is wrong; the message says how."""


class SkipError(Exception):
    """It cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One case, in one section of the results."""

    name: str
    group: str  # the line of the summary that it counts in; of an operator's check: the operator
    scope: str | tuple[str, ...]  # the modules that it starts from (`sources.files`), or a name in `sources.SCOPES`
    run: Callable[[], dict[str, Any]]  # gives the figures
    lasts: Callable[[], bool] = lambda: True  # whether the result is still there; if not, the case runs again
    needs: tuple[str, ...] = ()  # names of checks that must have passed before
    heeds: tuple[str, ...] = ()  # operators whose checks block it wherever one is red, needed or not
    section: str = ""
    seconds: float = 0.0  # of the budget, without which it does not begin
    able: Callable[[], object] = lambda: False  # whether it can run by now, where it was skipped before

    @property
    def key(self) -> Key:
        return self.section, self.name

    @property
    def modules(self) -> tuple[str, ...]:
        return SCOPES[self.scope] if isinstance(self.scope, str) else self.scope
