"""The stages of `make gpu`, and the process that runs them, which `gpu.py` watches."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu import (
    bench,
    check,
    failed_captures,
    gpu,
    ladder,
    processes,
    real_1,
    real_2,
    report,
    rivals,
    rounding,
    steps,
    throughput,
    train,
    wheels,
)
from benchmarks.gpu.cases import first
from benchmarks.gpu.job import Job, Key
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import DeadError, Runner, Stage, chosen
from benchmarks.gpu.real import Folder
from benchmarks.gpu.results import CHECK, FAILED, Entry
from benchmarks.gpu.suite import Arguments, Suite
from benchmarks.rival_modules import RIVALS
from drafttrain.ops import library

REAL = "real target, drafters"
AROUND = 15.0  # seconds of a command before its first case and after its last one


def stages(machine: Machine, maker: real_1.Maker, turns: real_2.Turns, word: str = "") -> list[Stage]:
    """The stages whose names hold the word, in order, each with its share of `gpu.MINUTES`; the rest is the last one's.

    The first two fit 11 minutes. They come first because a machine is often lent for no longer.
    """
    timed = of(bench.SECTION, bench.jobs(machine))
    decoding = tuple(job for job in timed if job.name.startswith(("step ", *(f"{other} " for other in bench.OTHERS))))
    drafters = tuple(job for job in timed if job.name.startswith("drafting "))
    rest = tuple(job for job in timed if job not in (*decoding, *drafters))
    races = rivals.jobs(machine)
    operators = check.operators(first(machine.rehearsal), machine, check.OF_FIGURES)
    material = of(real_1.SECTION, real_1.jobs(maker))
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
    for kept in (steps.target_of, ladder.target_of, rounding.exact_copy):
        kept.cache_clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def work(description: str) -> int:
    """The work of the watched process."""
    disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # before any tokenizer starts threads
    suite = Suite("", description)
    wheels.announce()
    given, machine = suite.arguments, suite.machine
    runner, folder = suite.runner(check.jobs(machine), between), Folder(given.real, machine)
    maker = real_1.Maker(folder, machine, given.force, lambda: runner.remaining() - AROUND)
    turns = real_2.turns_of(folder, machine, maker.remaining)
    planned = [
        Stage(stage.name, chosen(stage.jobs, given.only, ""), stage.minutes)
        for stage in stages(machine, maker, turns, given.stages)
    ]
    mark_dead(runner, planned, given)
    dead = False
    try:
        if [stage.name for stage in planned] == [REAL] and runner.remaining() > real_1.LEAST_SECONDS and not given.only:
            maker.begin()  # before the operators, which are built meanwhile
            turns.start(real_2.first_of(folder, given.only))
        print(f"operators: {library.state_on(machine.device).text}", flush=True)  # builds them, before any case begins
        runner.run(planned)
    except DeadError:
        dead = True
    finally:
        maker.end()
        turns.end()
    if dead and given.watched is not None:
        return gpu.AGAIN
    code = suite.end(runner, {stage.name: list(stage.jobs) for stage in planned})
    if machine.rehearsal:
        print(f"\n{report.goals_text({})}\nREHEARSAL: no goal is measured", flush=True)
        return code
    print(f"\n{report.goals_text(suite.results.known)}", flush=True)
    if any(stage.name == REAL for stage in planned):
        real_2.announce(suite.results.known)
    return code


def mark_dead(runner: Runner, planned: Sequence[Stage], given: Arguments) -> None:
    """Mark the case that ended the previous process as failed."""
    if not given.dead or given.watched is None or (key := gpu.interrupted(given.watched)) is None:
        return
    jobs = {job.key: job for job in [*runner.checks.values(), *(job for stage in planned for job in stage.jobs)]}
    if key in jobs:
        runner.keep(jobs[key], Entry(FAILED, note=given.dead))
    given.watched.unlink()


if __name__ == "__main__":
    sys.exit(work(str(gpu.__doc__).splitlines()[0]))
