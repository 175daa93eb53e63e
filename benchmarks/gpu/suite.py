"""The frame of the suites: command line, a time budget, one case after the other, and the rest for the next run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu import report
from benchmarks.gpu.job import Job, RedError, SkipError
from benchmarks.gpu.machine import Machine, NoGpuError
from benchmarks.gpu.plan import DeadError, Limits, Runner, Stage, chosen, ordered, summary
from benchmarks.gpu.results import CHECK, FAILED, FOLDER, Entry, Results
from benchmarks.gpu.sources import ROOT
from drafttrain.cli.quiet import quiet

__all__ = ["Arguments", "Job", "RedError", "SkipError", "Suite"]

BUDGET = 360.0  # seconds; a running case is finished
REAL = ROOT / "outputs" / "real"


@dataclass(frozen=True, slots=True)
class Arguments:
    rehearse: bool
    force: bool
    results: Path | None
    budget: float
    only: str
    real: Path
    watched: Path | None  # the file that names the running case, for the process that watches this one
    dead: str  # why the case that this file names ended its process
    minutes: float | None
    stages: str

    @staticmethod
    def read(description: str) -> Arguments:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, no figures, to find what breaks")
        parser.add_argument("--force", action="store_true", help="run what is done already, too")
        parser.add_argument("--results", type=Path, help="folder of the results and of the table, in place of the repository's")
        parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which no further case begins")
        parser.add_argument("--only", default="", help="cases whose names hold this")
        parser.add_argument("--real", type=Path, default=REAL, help="folder of gpu-real's target and data")
        parser.add_argument("--minutes", type=float, help="the budget of make gpu")
        parser.add_argument("--stages", default="", help="stages of make gpu whose names hold this")
        parser.add_argument("--watched", type=Path, help=argparse.SUPPRESS)
        parser.add_argument("--dead", default="", help=argparse.SUPPRESS)
        return Arguments(**vars(parser.parse_args()))

    @property
    def folder(self) -> Path | None:
        """The folder of the results. A rehearsal does not use the repository's."""
        return self.results or (None if self.rehearse else FOLDER)


class Suite:
    """A suite on one machine. section: of the results; a suite of several sections names none."""

    @property
    def title(self) -> str:
        return f"gpu-{self.section}" if self.section else "gpu"

    def __init__(self, section: str, description: str) -> None:
        """Ends the process with exit code 2 where there is no GPU."""
        quiet()
        self.section, self.arguments = section, Arguments.read(description)
        try:
            self.machine = Machine.here(self.arguments.rehearse)
        except NoGpuError as error:
            print(f"{self.title}: {error}", file=sys.stderr)
            sys.exit(2)
        torch.manual_seed(0)
        self.results = Results(self.arguments.folder, self.machine)
        said = ", ".join(f"{name} {value}" for name, value in self.machine.facts.items() if name != "gpu")
        print(f"{self.title} on {self.machine.name}: {said}", flush=True)
        if self.machine.rehearsal:
            print("REHEARSAL on the CPU: the code is run, nothing is measured", flush=True)

    def runner(self, checks: Iterable[Job], between: Callable[[], None] = lambda: None) -> Runner:
        """checks: all cases of gpu-check, on which others depend."""
        given = self.arguments
        limits = Limits(given.budget, given.force, retry=not given.dead)
        return Runner(self.results, chosen(checks, "", CHECK), limits, given.watched, between)

    def run(self, jobs: Sequence[Job], checks: Iterable[Job] = ()) -> int:
        """Run unfinished cases within the budget, checks before the cases that depend on them. Returns the exit code: 1 for
        any failure.
        """
        runner = self.runner(jobs if self.section == CHECK else checks)
        stage = Stage(self.section, chosen(jobs, self.arguments.only, self.section))
        try:
            runner.run([stage])
        except DeadError:
            print("the GPU takes no more work from this process: run the command again for the rest", flush=True)
        lines: dict[str, list[Job]] = {}
        for job in ordered([stage], runner.checks):
            lines.setdefault(job.group if job.section == self.section else "its checks", []).append(job)
        return self.end(runner, lines)

    def end(self, runner: Runner, lines: dict[str, list[Job]]) -> int:
        """Print the summary and write the tables; returns the exit code."""
        summary(lines, runner)
        if self.machine.rehearsal:
            print("rehearsed; no figures", flush=True)
        report.write(self.arguments.results, self.machine)
        entries: list[Entry | None] = [runner.entry(job) for jobs in lines.values() for job in jobs]
        return 1 if any(entry is not None and entry.status == FAILED for entry in entries) else 0
