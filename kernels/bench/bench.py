"""`make gpu-bench`: how fast are the operators and the decode steps on this GPU, against what its memory allows?

Refuses, with exit code 1, unless `make gpu-check` has passed for the same sources, torch and GPU. The figures that goals name
come first; when the budget of time is spent, the rest is left to the next run. docs/performance.md says what each figure means.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from kernels.bench import baselines, check, prefill, steps
from kernels.bench.case import Case
from kernels.bench.cases import BATCHES, CONTEXTS, GOALS, timed
from kernels.bench.machine import Copy, Machine, Race, Replay, nbytes
from kernels.bench.models import REHEARSED, TIMED
from kernels.bench.steps import Setting
from kernels.bench.suite import Job, Suite

SECTION = "bench"
CONTEXT = 4096  # that goals name
REPEATS = 20
MOST_SETS, MOST_BYTES = 24, 12 << 30  # of inputs in turn


@torch.no_grad()
def measure(case: Case, machine: Machine) -> dict[str, Any]:
    """Microseconds of one call among several captured in one graph, each on inputs of its own."""
    dtype = case.dtypes[-1]
    sets = [case.inputs(dtype, machine.device, seed=0)]
    moved = case.moved(dtype)
    wanted = -(-2 * machine.cached // moved)  # so that every call finds its inputs gone from the cache, where they are large
    sets += [case.inputs(dtype, machine.device, seed) for seed in range(1, most_sets(wanted, nbytes(sets[0].values())))]
    replay = Replay(lambda: [case.run(given) for given in sets], machine)
    race = Race.run({"op": lambda: machine.seconds(replay.run) / len(sets)}, Copy(machine), REPEATS)
    taken = race.seconds["op"]
    figures = {"us": 1e6 * taken, "bytes": moved, "bandwidth_share": moved / taken / race.bandwidth}
    return figures | {"cold": len(sets) >= wanted, "sets": len(sets), "copy_bandwidth": race.bandwidth}


def most_sets(wanted: int, size: int) -> int:
    return max(1, min(wanted, MOST_SETS, MOST_BYTES // size))


def jobs(machine: Machine) -> list[Job]:
    """The most important first, then model by model."""
    operators = [Job(case.name, case.op, "operators", partial(measure, case, machine)) for case in timed(machine.rehearsal)]
    first, *others = REHEARSED if machine.rehearsal else TIMED
    context = 64 if machine.rehearsal else CONTEXT
    named = 0 if machine.rehearsal else len(GOALS)
    found = operators[:named] + alone(first, context, machine) + baselines.jobs(first, context, machine) + operators[named:]
    found += prefill.jobs(machine) + batched(first, context, machine)
    for model in others:
        found += alone(model, context, machine) + baselines.jobs(model, context, machine) + batched(model, context, machine)
    return found


def alone(model: str, context: int, machine: Machine) -> list[Job]:
    """Batch 1, the goals' context first."""
    contexts = [] if machine.rehearsal else [c for c in CONTEXTS if c != context]
    return [steps.job(Setting(model, 1, c), machine) for c in (context, *contexts)]


def batched(model: str, context: int, machine: Machine) -> list[Job]:
    if machine.rehearsal:
        return [steps.job(Setting(model, 3, context), machine)]
    contexts = [context, *(c for c in CONTEXTS if c != context)]
    return [steps.job(Setting(model, rows, c), machine) for c in contexts for rows in BATCHES]


def refused(suite: Suite) -> bool:
    """Says why, in one line. A rehearsal that keeps nothing has no checks to look at."""
    if suite.machine.rehearsal and suite.arguments.folder is None:
        return False
    undone = suite.undone(check.SECTION, check.jobs(suite.machine))
    if undone:
        what = f"{len(undone)} checks, {undone[0]} among them, have not passed with these sources, this torch and this GPU"
        print(f"gpu-{suite.section}: {what}; run make gpu-check first", file=sys.stderr)
    return bool(undone)


def main() -> int:
    suite = Suite(SECTION, __doc__.splitlines()[0])
    return 1 if refused(suite) else suite.run(jobs(suite.machine))


if __name__ == "__main__":
    sys.exit(main())
