"""The frame of the suites: command line, a budget of time, one case after the other, what is left for the next run."""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from drafttrain.commands.quiet import quiet
from kernels.bench import report
from kernels.bench.machine import Machine, NoGpuError
from kernels.bench.results import FAILED, FOLDER, PASSED, ROOT, SKIPPED, Entry, Results

BUDGET = 360.0  # seconds; a case that has begun goes on
REAL = ROOT / "outputs" / "real"


class RedError(Exception):
    """What was run is wrong; the message says how."""


class SkipError(Exception):
    """It cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One case. group: the line of the summary it counts in. scope: of `results.SOURCES`. run: gives the figures.

    lasts: whether what it made is still there; where it is not, the case is run again.
    """

    name: str
    group: str
    scope: str
    run: Callable[[], dict[str, Any]]
    lasts: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class Arguments:
    rehearse: bool
    force: bool
    results: Path | None
    budget: float
    only: str
    real: Path

    @staticmethod
    def read(description: str) -> Arguments:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, no figures, to find what breaks")
        parser.add_argument("--force", action="store_true", help="run what is done already, too")
        parser.add_argument("--results", type=Path, help="folder of the results and of the table, in place of the repository's")
        parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which no further case begins")
        parser.add_argument("--only", default="", help="cases whose names hold this")
        parser.add_argument("--real", type=Path, default=REAL, help="folder of gpu-real's target and data")
        return Arguments(**vars(parser.parse_args()))

    @property
    def folder(self) -> Path | None:
        """Where results lie; a rehearsal leaves the repository's alone."""
        return self.results or (None if self.rehearse else FOLDER)


class Suite:
    """One of the suites on one machine. section: of the results."""

    def __init__(self, section: str, description: str) -> None:
        """Ends the process with exit code 2 where there is no GPU."""
        quiet()
        self.section, self.arguments = section, Arguments.read(description)
        try:
            self.machine = Machine.here(self.arguments.rehearse)
        except NoGpuError as error:
            print(f"gpu-{section}: {error}", file=sys.stderr)
            sys.exit(2)
        torch.manual_seed(0)
        self.results = Results(self.arguments.folder, self.machine)
        said = ", ".join(f"{name} {value}" for name, value in self.machine.facts.items() if name != "gpu")
        print(f"gpu-{section} on {self.machine.name}: {said}", flush=True)
        if self.machine.rehearsal:
            print("REHEARSAL on the CPU: the code is run, nothing is measured", flush=True)

    def run(self, jobs: Sequence[Job]) -> int:
        """Run what is not done, as long as the budget lasts; the exit code: 1 where anything is red."""
        chosen = [job for job in jobs if self.arguments.only in job.name]
        known = {job.name: None if self.arguments.force else self._known(job) for job in chosen}
        # what failed before comes last, so that a case that ends the process keeps no other from its turn
        waiting = [j for j in chosen if known[j.name] is None] + [
            j for j in chosen if (e := known[j.name]) and e.status == FAILED
        ]
        began = perf_counter()
        for job in waiting:
            if perf_counter() - began > self.arguments.budget:
                break
            known[job.name] = entry = self._attempt(job)
            self.results.put(self.section, job.name, job.scope, entry)
            print(f"{entry.status:8}{job.name}{': ' if entry.note else ''}{entry.note}", flush=True)
            if entry.status == FAILED and not self._alive():
                print("the GPU takes no more work from this process: run the command again for the rest", flush=True)
                break
        self._summary(chosen, known)
        report.write(self.arguments.results, self.machine)
        return 1 if any(e is not None and e.status == FAILED for e in known.values()) else 0

    def undone(self, section: str, jobs: Sequence[Job]) -> list[str]:
        """Names of these cases of another suite that have not passed with the same sources and torch on this GPU."""
        found = {job.name: self.results.of(section, job.name, job.scope) for job in jobs}
        return [name for name, entry in found.items() if entry is None or entry.status == FAILED]

    def _known(self, job: Job) -> Entry | None:
        return self.results.of(self.section, job.name, job.scope) if job.lasts() else None

    def _attempt(self, job: Job) -> Entry:
        try:
            return Entry(PASSED, job.run())
        except SkipError as reason:
            return Entry(SKIPPED, note=str(reason))
        except RedError as reason:
            return Entry(FAILED, note=str(reason))
        except torch.OutOfMemoryError:
            return Entry(SKIPPED, note="does not fit the GPU's memory")
        except (Exception, SystemExit) as error:  # whatever a case raises: nobody watches, and the others still count
            traceback.print_exc()
            return Entry(FAILED, note=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        finally:
            gc.collect()

    def _alive(self) -> bool:
        try:
            self.machine.wait()
        except RuntimeError:
            return False
        return True

    def _summary(self, jobs: Sequence[Job], known: dict[str, Entry | None]) -> None:
        counts: dict[str, Counter[str]] = {}
        for job in jobs:
            entry = known[job.name]
            counts.setdefault(job.group, Counter())[entry.status if entry else "left"] += 1
        columns = (PASSED, FAILED, SKIPPED, "left")
        print(f"\n{'':24}" + "".join(f"{name:>9}" for name in columns))
        for group, count in counts.items():
            print(f"{group:24}" + "".join(f"{count[name] or '':>9}" for name in columns))
        left = sum(count["left"] for count in counts.values())
        if left:
            print(f"{left} cases are left: run the same command again", flush=True)
        if self.machine.rehearsal:
            print("rehearsed; no figures", flush=True)
