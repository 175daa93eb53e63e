"""`make gpu`: all suites in one command, the most important cases first, within a budget of minutes; ends with the goals.

Every result is written when it is known, and the same command continues where the last one ended. This process only watches
another one that does the work. A case that ends that process, or hangs, counts as failed, and a new process continues with the
next case.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, time

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu import (
    bench,
    check,
    drafting,
    failed_captures,
    ladder,
    processes,
    real_1,
    real_2,
    report,
    rounding,
    steps,
    throughput,
    train,
    wheels,
)
from benchmarks.gpu.cases import first
from benchmarks.gpu.job import Job, Key
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import DeadError, Runner, Stage, chosen, interrupted
from benchmarks.gpu.real import Folder
from benchmarks.gpu.results import CHECK, FAILED, Entry
from benchmarks.gpu.suite import Arguments, Suite
from drafttrain.ops import library

MINUTES = 45.0
AGAIN = 75  # exit code of a process whose device takes no more work
HANGS = 600.0  # seconds of one case after which its process is killed
POLL = 0.2  # seconds between two checks of the process
REAL = "real target, drafters"


def stages(machine: Machine, maker: real_1.Maker, worker: real_2.Worker) -> list[Stage]:
    """The stages in order, each with its share of `MINUTES`. The rest belongs to the last one."""
    timed = of(bench.SECTION, bench.jobs(machine))
    decoding = tuple(job for job in timed if job.name.startswith(("step ", *(f"{other} " for other in bench.OTHERS))))
    rest = tuple(job for job in timed if job not in decoding)
    operators = check.operators(first(machine.rehearsal), machine, check.OF_FIGURES)
    important = of(CHECK, operators) + of(bench.SECTION, bench.goals(machine))
    material = of(real_1.SECTION, real_1.jobs(maker))
    distilled = of(real_2.SECTION, real_2.jobs(maker.folder, machine, worker))
    found = [
        Stage("operators and goals", important, 3),
        Stage("texts of every family", of(CHECK, [ladder.job(rung, machine) for rung in ladder.early(machine)]), 5),
        Stage("training steps", of(train.SECTION, throughput.jobs(machine)), 6),
        Stage("drafters' steps", of(bench.SECTION, drafting.jobs(machine)), 5),
        Stage("several processes", of(CHECK, processes.jobs(machine)), 2),
        Stage("operators, other sizes", of(CHECK, check.larger(machine)) + rest, 4),
        Stage("other decode steps", decoding, 4),
        Stage("losses and learning", of(train.SECTION, train.jobs(machine)), 3),
        Stage(REAL, material + distilled, 13),
        Stage("captures that fail", of(CHECK, failed_captures.jobs(machine))),
        Stage("all other checks", of(CHECK, check.jobs(machine))),
    ]
    return once(found)


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
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # as gpu-real-1 sets it
    suite, worker = Suite("", description), real_2.Worker()
    wheels.announce()
    given, machine = suite.arguments, suite.machine
    maker = real_1.Maker(Folder(given.real, machine), machine, given.force)
    planned = [stage for stage in stages(machine, maker, worker) if given.stages in stage.name]
    planned = [Stage(stage.name, chosen(stage.jobs, given.only, ""), stage.minutes) for stage in planned]
    runner = suite.runner(check.jobs(machine), between)
    maker.remaining = runner.remaining
    print(f"operators: {library.state_on(machine.device).text}", flush=True)  # builds them, before any case begins
    mark_dead(runner, planned, given)
    dead = False
    try:
        runner.run(planned)
    except DeadError:
        dead = True
    finally:
        worker.end()
    if dead and given.watched is not None:
        return AGAIN
    code = suite.end(runner, {stage.name: list(stage.jobs) for stage in planned})
    if not machine.rehearsal:
        print(f"\n{report.goals_text(suite.results.known)}", flush=True)
    else:
        print(f"\n{report.goals_text({})}\nREHEARSAL: no goal is measured", flush=True)
    return code


def mark_dead(runner: Runner, planned: Sequence[Stage], given: Arguments) -> None:
    """Mark the case that ended the previous process as failed."""
    if not given.dead or given.watched is None or (key := interrupted(given.watched)) is None:
        return
    jobs = {job.key: job for job in [*runner.checks.values(), *(job for stage in planned for job in stage.jobs)]}
    if key in jobs:
        runner.keep(jobs[key], Entry(FAILED, note=given.dead))
    given.watched.unlink()


def watch(arguments: Sequence[str], minutes: float) -> int:
    """Run `work` in a separate process, and in a new one where that ends or hangs before its time. Returns the exit code."""
    began, dead, ended = perf_counter(), "", set[Key | None]()
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "running.json"
        while True:
            left = 60 * minutes - (perf_counter() - began)
            more = ["--budget", str(left), "--watched", str(note), *(["--dead", dead] if dead else [])]
            kept = [word for word in arguments if not (dead and word == "--force")]
            child = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.gpu", *kept, *more])
            try:
                dead = awaited(child, note)
            finally:
                child.kill()
            if not dead:
                return child.returncode
            key = interrupted(note)
            if child.returncode != AGAIN and (key is None or key in ended):
                print(f"gpu: {dead}, and no case was running that had not done so before", file=sys.stderr)
                return 1
            ended.add(key)
            print(f"{dead}; a new process goes on with the next case", flush=True)


def awaited(child: subprocess.Popen[bytes], note: Path) -> str:
    """Why the process ended before its time; empty where it did not."""
    while child.poll() is None:
        try:
            if time() - note.stat().st_mtime > HANGS:
                child.kill()
                child.wait()
                return f"not done in {HANGS:.0f} s"
        except OSError:
            pass  # between two cases
        try:
            child.wait(POLL)
        except subprocess.TimeoutExpired:
            continue
    if child.returncode in (0, 1, 2):
        return ""
    return "the device takes no more work" if child.returncode == AGAIN else f"its process ended with code {child.returncode}"


def main() -> int:
    description = str(__doc__).splitlines()[0]
    given = Arguments.read(description)
    if given.watched is not None:
        return work(description)
    return watch(sys.argv[1:], given.minutes or MINUTES)


if __name__ == "__main__":
    sys.exit(main())
