"""One case of a suite: its work, its sources, and the checks on which its figures depend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.sources import SCOPES

Key = tuple[str, str]  # (section, name)


class RedError(Exception):
    """The result is wrong; the message says how."""


class SkipError(Exception):
    """The case cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One case, in one section of the results."""

    name: str
    group: str  # its line in the summary; for an operator's check: the operator
    scope: str | tuple[str, ...]  # the modules that it starts from (`sources.files`), or a name in `sources.SCOPES`
    run: Callable[[], dict[str, Any]]  # returns the figures
    lasts: Callable[[], bool] = lambda: True  # whether the result still exists; if not, the case runs again
    needs: tuple[str, ...] = ()  # names of checks that must have passed before
    heeds: tuple[str, ...] = ()  # operators of which any failed check blocks it, needed or not
    section: str = ""
    seconds: float = 0.0  # of the budget that must be left for it to begin
    able: Callable[[], object] = lambda: False  # whether it can run now after it was skipped

    @property
    def key(self) -> Key:
        return self.section, self.name

    @property
    def modules(self) -> tuple[str, ...]:
        return SCOPES[self.scope] if isinstance(self.scope, str) else self.scope
