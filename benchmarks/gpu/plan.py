"""The order of the cases: stages with a share of the budget each, and before every case its own checks.

A case that depends on a failed check is blocked, and no other case is. A stage whose share is used up continues at the end,
before the stages without a share, so that a slow stage delays no other. Cases that failed in an earlier run come last.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.gpu.results import BLOCKED, FAILED, PASSED, SKIPPED, Entry, Job, Key, RedError, Results, SkipError, why
from benchmarks.gpu.sources import digest
from drafttrain.core.files import atomic_write_json

LEFT = "left"
COLUMNS = (PASSED, FAILED, BLOCKED, SKIPPED, LEFT)
DONE = (PASSED, SKIPPED)


class DeadError(Exception):
    """The device accepts no more work from this process."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the plan."""

    name: str
    jobs: tuple[Job, ...]
    minutes: float | None = None  # its share of the budget, over all commands until everything is done; None: the rest


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one command."""

    budget: float  # seconds after which no further case begins
    force: bool = False  # run finished cases again
    retry: bool = True  # run cases once more that failed before


class Runner:
    """Runs stages. checks: every check, so that a case can have its own checks run first. note: a file that names the running
    case, for a process that watches this one; None: no process does. between: called before each stage.
    """

    def __init__(
        self,
        results: Results,
        checks: Iterable[Job],
        limits: Limits,
        note: Path | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.results, self.limits, self.note, self.between = results, limits, note, between
        self.checks = {job.name: job for job in checks}
        self.began, self.ran = perf_counter(), dict[Key, Entry]()

    def run(self, stages: Sequence[Stage]) -> None:
        """Raises DeadError where the device accepts no more work. All finished results are kept."""
        spent, left = self.results.spent(plan_name(stages)), list[Job]()
        for stage in stages:
            if stage.minutes is not None:
                left += self._stage(stage.name, stage.jobs, 60 * stage.minutes, spent)
        rest = [job for stage in stages if stage.minutes is None for job in stage.jobs]
        # cases that are left for lack of time, or that wait for a check that failed before
        later = self._stage("", [*left, *rest], self.limits.budget, {})
        if self.limits.retry:
            end = perf_counter() + self.remaining()
            failed = [job for job in ordered(stages, self.checks) if self._failed_before(job)]
            self._within(failed, end, again=True)
            self._within(later, end, again=True)

    def _stage(self, name: str, jobs: Sequence[Job], share: float, spent: dict[str, float]) -> list[Job]:
        """The cases that are left when the share, in seconds, or the budget is used up."""
        self.between()
        began = perf_counter()
        try:
            return self._within(jobs, began + min(self.remaining(), share - spent.get(name, 0.0)))
        finally:
            spent[name] = spent.get(name, 0.0) + perf_counter() - began
            self.results.write()

    def entry(self, job: Job) -> Entry | None:
        """How a case ended, in this run or before; None where it is to run."""
        if job.key in self.ran:
            return self.ran[job.key]
        if self.limits.force or not job.lasts():
            return None
        found = self.results.of(job)
        return None if found is not None and found.status == SKIPPED and job.able() else found

    def blocked(self, job: Job) -> str | None:
        """The failed check that blocks a case. A check that has not run yet does not block."""
        heeded = [check for check in self.checks.values() if check.group in job.heeds]
        for check in [*(self.checks[name] for name in job.needs), *heeded]:
            if check.key != job.key and (entry := self.entry(check)) is not None and entry.status == FAILED:
                return check.name
        return None

    def remaining(self) -> float:
        """Seconds left of the budget."""
        return self.limits.budget - (perf_counter() - self.began)

    def _done(self, job: Job) -> bool:
        return (entry := self.entry(job)) is not None and entry.status in DONE

    def _failed_before(self, job: Job) -> bool:
        return job.key not in self.ran and (entry := self.entry(job)) is not None and entry.status == FAILED

    def _within(self, jobs: Iterable[Job], until: float, again: bool = False) -> list[Job]:
        """Run cases until then; return those that have not run. again: also those that failed before."""
        left = []
        for job in jobs:
            if self._done(job):
                continue
            for one in [*(self.checks[name] for name in job.needs), job]:
                if self._done(one) or one.key in self.ran or (self._failed_before(one) and not again):
                    continue  # it had its turn, or has it at the end
                if one is job and self._waits(job, again):
                    left.append(job)
                elif perf_counter() + one.seconds >= until:
                    left.append(job)
                    break
                else:
                    self._attempt(one)
        return left

    def _waits(self, job: Job, again: bool) -> bool:
        """Whether its failed check may still run again."""
        cause = self.blocked(job)
        return cause is not None and not again and self.limits.retry and self._failed_before(self.checks[cause])

    def _attempt(self, job: Job) -> None:
        cause = self.blocked(job)
        if self.note is not None:
            atomic_write_json(self.note, {"section": job.section, "name": job.name})
        entry = attempted(job) if cause is None else Entry(BLOCKED, note=why(cause))
        self.keep(job, entry)
        if self.note is not None:
            self.note.unlink(missing_ok=True)
        if entry.status == FAILED and not alive(self.results):
            raise DeadError

    def keep(self, job: Job, entry: Entry) -> None:
        self.ran[job.key] = entry
        self.results.put(job, entry)
        print(f"{entry.status:8}{job.name}{': ' if entry.note else ''}{entry.note}", flush=True)


def attempted(job: Job) -> Entry:
    try:
        return Entry(PASSED, job.run())
    except SkipError as reason:
        return Entry(SKIPPED, note=str(reason))
    except RedError as reason:
        return Entry(FAILED, note=str(reason))
    except torch.OutOfMemoryError:
        return Entry(SKIPPED, note="does not fit the GPU's memory")
    except (Exception, SystemExit) as error:  # a case may raise anything: the run is unattended, and the other cases go on
        traceback.print_exc()
        return Entry(FAILED, note=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    finally:
        gc.collect()


def alive(results: Results) -> bool:
    try:
        results.machine.wait()
    except RuntimeError:
        return False
    return True


def ordered(stages: Iterable[Stage], checks: dict[str, Job]) -> list[Job]:
    """Every case once, in the order of the plan, each after its checks."""
    jobs = [one for stage in stages for job in stage.jobs for one in [*(checks[name] for name in job.needs), job]]
    return list({job.key: job for job in jobs}.values())


def plan_name(stages: Iterable[Stage]) -> str:
    """A name that changes with an edit to anything that a case depends on."""
    parts = [f"{job.section} {job.name} {digest(job.modules)}" for stage in stages for job in stage.jobs]
    return sha256("\n".join(parts).encode()).hexdigest()[:12]


def chosen(jobs: Iterable[Job], word: str, section: str) -> tuple[Job, ...]:
    """The cases whose names contain the word. Checks belong to the section of checks wherever they are."""
    return tuple(replace(job, section=job.section or section) for job in jobs if word in job.name)


def summary(lines: dict[str, list[Job]], runner: Runner) -> int:
    """Print for each line how many cases ended how; return the number of those that are left."""
    print(f"\n{'':24}" + "".join(f"{name:>9}" for name in COLUMNS))
    left = 0
    for name, jobs in lines.items():
        found = [runner.entry(job) for job in jobs]
        count = Counter(LEFT if entry is None else entry.status for entry in found)
        left += count[LEFT]
        print(f"{name:24}" + "".join(f"{count[column] or '':>9}" for column in COLUMNS))
    if left:
        print(f"{left} cases are left: run the same command again", flush=True)
    return left
