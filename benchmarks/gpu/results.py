"""Cases, and a machine's results: one JSON file per GPU, written after every case, so that a later run can continue."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.sources import ROOT, SCOPES, digest
from drafttrain.core.files import atomic_write_text

FOLDER = ROOT / "benchmarks" / "results"
PASSED, FAILED, SKIPPED, BLOCKED = "passed", "failed", "skipped", "blocked"
CHECK = "check"  # the section that others depend on

Key = tuple[str, str]  # (section, name)
Section = dict[str, dict[str, Any]]


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


@dataclass(frozen=True, slots=True)
class Entry:
    """How a case ended."""

    status: str
    figures: dict[str, Any] = field(default_factory=dict)  # by name, plain numbers
    note: str = ""  # why it failed, was skipped or is blocked


class Results:
    """folder None: nothing is read or written. A rehearsal's file has its own name and holds no figures."""

    def __init__(self, folder: Path | None, machine: Machine) -> None:
        self.machine = machine
        self.path = None if folder is None else folder / f"{machine.slug}.json"
        self.known: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            self.known = json.loads(self.path.read_text(encoding="utf-8"))

    def of(self, job: Job) -> Entry | None:
        """How a case ended with these sources and this torch; None where it has not run."""
        found = self.known.get(job.section, {}).get(job.name)
        if found is None or found["sources"] != digest(job.modules) or found["torch"] != self.machine.facts["torch"]:
            return None
        return Entry(found["status"], found["figures"], found["note"])

    def put(self, job: Job, entry: Entry) -> None:
        figures = {} if self.machine.rehearsal else entry.figures
        record = {"status": entry.status, "figures": figures, "note": entry.note, "group": job.group}
        record |= {"needs": list(job.needs), "heeds": list(job.heeds), "modules": list(job.modules)}
        record |= {"sources": digest(job.modules), "torch": self.machine.facts["torch"]}
        self.known["machine"] = self.machine.facts | {"name": self.machine.name}
        self.known.setdefault(job.section, {})[job.name] = record
        self.write()

    def spent(self, of: str) -> dict[str, float]:
        """Seconds that each stage of the plan `of` has taken so far, by the stage's name; a mutable dict."""
        found: dict[str, Any] = self.known.get("spent", {})
        if found.get("of") != of:
            self.known["spent"] = found = {"of": of, "seconds": {}}
        seconds: dict[str, float] = found["seconds"]
        return seconds

    def write(self) -> None:
        if self.path is not None:
            atomic_write_text(self.path, written(self.known))


def written(known: dict[str, Any]) -> str:
    """A machine's results as JSON with a case a line, so that a diff shows the cases of a run."""
    sections = []
    for name, section in known.items():
        cases = [f"{json.dumps(case)}: {json.dumps(entry, allow_nan=False)}" for case, entry in section.items()]
        sections.append(json.dumps(name) + ": {\n" + ",\n".join(cases) + "\n}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def red(needs: Sequence[str], heeds: Sequence[str], checks: Section) -> str | None:
    """The first failed check among those needed and among those of the heeded operators. checks: by name."""
    named = [name for name in needs if name in checks and checks[name]["status"] == FAILED]
    found = [name for name, entry in checks.items() if entry.get("group") in heeds and entry["status"] == FAILED]
    return next(iter(named + found), None)


def visible(known: dict[str, Any]) -> dict[str, Any]:
    """A machine's results without the figures of cases that depend on a failed check."""
    checks = {name: entry for name, entry in known.get(CHECK, {}).items() if not older(entry)}
    found = dict(known)
    for section, entries in known.items():
        if section not in ("machine", "spent", CHECK):
            found[section] = {name: _shown(entry, checks) for name, entry in entries.items()}
    return found


def _shown(entry: dict[str, Any], checks: Section) -> dict[str, Any]:
    cause = red(entry.get("needs", ()), entry.get("heeds", ()), checks)
    return entry if cause is None else entry | {"status": BLOCKED, "figures": {}, "note": why(cause)}


def why(check: str) -> str:
    return f"its check is red: {check}"


def older(entry: dict[str, Any]) -> bool:
    """Whether other sources than the present ones gave the result."""
    return "modules" not in entry or entry["sources"] != digest(tuple(entry["modules"]))
