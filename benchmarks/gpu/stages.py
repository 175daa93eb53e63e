"""The stages of `make gpu`, and the process that runs them, which `gpu.py` watches. It ends with 1 where a case failed, with 2
without a GPU."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu import (
    bench,
    check,
    draws,
    failed_captures,
    gpu,
    ladder,
    processes,
    real,
    real_2,
    report,
    rivals,
    steps,
    throughput,
    train,
    wheels,
)
from benchmarks.gpu.cases import first
from benchmarks.gpu.machine import Machine, NoGpuError
from benchmarks.gpu.plan import DeadError, Limits, Runner, Stage, chosen, ordered, summary
from benchmarks.gpu.real import Folder
from benchmarks.gpu.results import CHECK, FAILED, FOLDER, Entry, Job, Key, Results
from benchmarks.gpu.sources import ROOT
from benchmarks.rival_modules import RIVALS
from drafttrain.cli.quiet import quiet
from drafttrain.ops import library

REAL = "real target, drafters"
AROUND = 15.0  # seconds of a command before its first case and after its last one


@dataclass(frozen=True, slots=True)
class Arguments:
    rehearse: bool
    force: bool
    results: Path | None
    minutes: float  # read by `gpu.py`
    budget: float
    section: str
    stages: str
    only: str
    real: Path
    watched: Path | None  # the file that names the running case, for the process that watches this one
    dead: str  # why the case that this file names ended its process

    @staticmethod
    def read() -> Arguments:
        parser = argparse.ArgumentParser(prog="benchmarks.gpu.gpu", description=str(gpu.__doc__).splitlines()[0])
        parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, no figures, to find what breaks")
        parser.add_argument("--force", action="store_true", help="run what is done already, too")
        parser.add_argument("--results", type=Path, help="folder of the results and of the table, in place of the repository's")
        parser.add_argument("--minutes", type=float, default=gpu.MINUTES, help="after which no further case begins")
        parser.add_argument("--section", default="", help="cases of this section: check, bench or train")
        parser.add_argument("--stages", default="", help="stages whose names hold this")
        parser.add_argument("--only", default="", help="cases whose names hold this")
        parser.add_argument("--real", type=Path, default=ROOT / "outputs" / "real", help="folder of gpu-real's target and data")
        parser.add_argument("--budget", type=float, default=60 * gpu.MINUTES, help=argparse.SUPPRESS)  # seconds that are left
        parser.add_argument("--watched", type=Path, help=argparse.SUPPRESS)
        parser.add_argument("--dead", default="", help=argparse.SUPPRESS)
        return Arguments(**vars(parser.parse_args()))

    @property
    def folder(self) -> Path | None:
        """The folder of the results. A rehearsal does not use the repository's."""
        return self.results or (None if self.rehearse else FOLDER)

    def asked(self, job: Job) -> bool:
        return self.only in job.name and self.section in ("", job.section)


def stages(machine: Machine, maker: real.Maker, turns: real_2.Turns, word: str = "") -> list[Stage]:
    """The stages whose names hold the word, in order, each with its share of `gpu.MINUTES`; the rest is the last one's.

    The first two fit 11 minutes. They come first because a machine is often lent for no longer.
    """
    timed = of(bench.SECTION, bench.jobs(machine))
    decoding = tuple(job for job in timed if job.name.startswith("step "))
    drafters = tuple(job for job in timed if job.name.startswith("drafting "))
    rest = tuple(job for job in timed if job not in (*decoding, *drafters))
    races = rivals.jobs(machine)
    operators = check.operators(first(machine.rehearsal), machine, check.OF_FIGURES)
    material = of(real.SECTION, real.jobs(maker))
    distilled = of(real_2.SECTION, real_2.jobs(maker.folder, machine, turns))
    wanted = {name for job in distilled for name in job.needs}  # they run while the target is pretrained
    before = of(CHECK, [job for job in check.jobs(machine) if job.name in wanted])
    found = [
        Stage("goals", of(bench.SECTION, bench.goals(machine)) + of(train.SECTION, races[: len(RIVALS)]), 4),
        Stage(REAL, before + material + distilled, 7),
        Stage("training steps", of(train.SECTION, throughput.jobs(machine) + races), 6),
        Stage("operators", of(CHECK, operators), 2),
        Stage("texts of every family", of(CHECK, [ladder.job(rung, machine) for rung in ladder.early(machine)]), 5),
        Stage("drafters' steps", drafters, 4),
        Stage("several processes", of(CHECK, processes.jobs(machine)), 2),
        Stage("other decode steps", decoding, 5),
        Stage("operators, other sizes", of(CHECK, check.larger(machine)) + rest, 4),
        Stage("losses and learning", of(train.SECTION, train.jobs(machine)), 3),
        Stage("captures that fail", of(CHECK, failed_captures.jobs(machine))),
        Stage("all other checks", of(CHECK, check.jobs(machine))),
    ]
    return once([stage for stage in found if word in stage.name])


def of(section: str, jobs: Sequence[Job]) -> tuple[Job, ...]:
    return chosen(jobs, "", section)


def once(stages: Sequence[Stage]) -> list[Stage]:
    """Each case in the first stage that names it."""
    seen: set[Key] = set()
    found = []
    for stage in stages:
        jobs = {job.key: job for job in stage.jobs if job.key not in seen}
        seen |= jobs.keys()
        found.append(Stage(stage.name, tuple(jobs.values()), stage.minutes))
    return found


def between() -> None:
    """Free the objects that one stage keeps for its own cases, mostly models."""
    for kept in (steps.target_of, ladder.target_of, draws.exact_copy):
        kept.cache_clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def work() -> int:
    """The work of the watched process."""
    quiet()
    disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # before any tokenizer starts threads
    given = Arguments.read()
    try:
        machine = Machine.here(given.rehearse)
    except NoGpuError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    print(f"gpu on {machine.name}: " + ", ".join(f"{k} {v}" for k, v in machine.facts.items() if k != "gpu"), flush=True)
    if machine.rehearsal:
        print("REHEARSAL on the CPU: the code is run, nothing is measured", flush=True)
    if said := wheels.provide():
        print(said, flush=True)
    limits = Limits(given.budget, given.force, retry=not given.dead)
    results, checks = Results(given.folder, machine), of(CHECK, check.jobs(machine))
    runner, folder = Runner(results, checks, limits, given.watched, between), Folder(given.real, machine)
    maker = real.Maker(folder, machine, given.force, lambda: runner.remaining() - AROUND)
    turns = real_2.turns_of(folder, machine, maker.remaining)
    found = stages(machine, maker, turns, given.stages)
    parts = [Stage(stage.name, tuple(filter(given.asked, stage.jobs)), stage.minutes) for stage in found]
    planned = [stage for stage in parts if stage.jobs]
    mark_dead(runner, planned, given)
    try:
        if [stage.name for stage in planned] == [REAL] and runner.remaining() > real.LEAST_SECONDS and not given.only:
            maker.begin()  # before the operators, which are built meanwhile
            turns.start(real_2.first_of(folder, given.only))
        print(f"operators: {library.state_on(machine.device).text}", flush=True)  # builds them, before any case begins
        runner.run(planned)
    except DeadError:
        if given.watched is not None:
            return gpu.AGAIN
    finally:
        maker.end()
        turns.end()
    summary({stage.name: list(stage.jobs) for stage in planned}, runner)
    report.write(given.results, machine)
    if machine.rehearsal:
        print(f"rehearsed; no figures\n\n{report.goals_text({})}\nREHEARSAL: no goal is measured", flush=True)
    else:
        print(f"\n{report.goals_text(results.known)}", flush=True)
        if any(stage.name == REAL for stage in planned):
            real_2.announce(results.known)
    ended = [runner.entry(job) for job in ordered(planned, runner.checks)]
    return int(any(entry is not None and entry.status == FAILED for entry in ended))


def mark_dead(runner: Runner, planned: Sequence[Stage], given: Arguments) -> None:
    """Mark the case that ended the previous process as failed."""
    if not given.dead or given.watched is None or (key := gpu.interrupted(given.watched)) is None:
        return
    jobs = {job.key: job for job in [*runner.checks.values(), *(job for stage in planned for job in stage.jobs)]}
    if key in jobs:
        runner.keep(jobs[key], Entry(FAILED, note=given.dead))
    given.watched.unlink()


if __name__ == "__main__":
    sys.exit(work())
