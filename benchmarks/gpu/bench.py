"""`make gpu-bench`: the speed of the operators and of the decode steps on this GPU, compared with its memory bandwidth.

Every figure depends on the checks of its own operators and on a few texts. Checks that have not run yet run first, and a
figure with a failed check is not measured. The figures that have goals come first. When the time budget is used up, the rest
is left to the next run. docs/performance.md explains each figure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import baselines, check, drafting, prefill, steps
from benchmarks.gpu.case import Case
from benchmarks.gpu.cases import BATCHES, CONTEXTS, GOALS, NODES, timed
from benchmarks.gpu.ladder import PLAIN
from benchmarks.gpu.machine import Copy, Machine, Race, Replay, nbytes
from benchmarks.gpu.models import REHEARSED, TIMED
from benchmarks.gpu.steps import Setting
from benchmarks.gpu.suite import Job, Suite

SECTION = "bench"
OTHERS = tuple(baselines.MAKERS)
CONTEXT = 4096  # of the goals
REPEATS = 20
MOST_SETS, MOST_BYTES = 24, 12 << 30  # of the inputs that are used in turn


@torch.no_grad()
def measure(case: Case, machine: Machine) -> dict[str, Any]:
    """Microseconds of one call. Several calls are captured in one graph, each with its own inputs."""
    dtype = case.dtypes[-1]
    sets = [case.inputs(dtype, machine.device, seed=0)]
    moved = case.moved(dtype)
    wanted = -(-2 * machine.cached // moved)  # so that large inputs have left the cache before they are used again
    sets += [case.inputs(dtype, machine.device, seed) for seed in range(1, most_sets(wanted, nbytes(sets[0].values())))]
    replay = Replay(lambda: [case.run(given) for given in sets], machine)
    race = Race.run({"op": lambda: machine.seconds(replay.run) / len(sets)}, Copy(machine), REPEATS)
    taken = race.seconds["op"]
    figures = {"us": 1e6 * taken, "bytes": moved, "bandwidth_share": moved / taken / race.bandwidth}
    return figures | {"cold": len(sets) >= wanted, "sets": len(sets), "copy_bandwidth": race.bandwidth}


def most_sets(wanted: int, size: int) -> int:
    return max(1, min(wanted, MOST_SETS, MOST_BYTES // size))


def jobs(machine: Machine) -> list[Job]:
    """All jobs, the most important first, then model by model."""
    first, *others = REHEARSED if machine.rehearsal else TIMED
    context = 64 if machine.rehearsal else CONTEXT
    found = goals(machine) + against_transformers(first, context, machine) + drafting.jobs(machine) + prefill.jobs(machine)
    found += [job for job in operators(timed(machine.rehearsal), machine) if job.name not in {named.name for named in found}]
    found += alone(first, context, machine)[1:] + batched(first, context, machine)
    for model in others:
        found += (
            alone(model, context, machine) + against_transformers(model, context, machine) + batched(model, context, machine)
        )
    return found


def goals(machine: Machine) -> list[Job]:
    """The jobs with goals: the plain step, the largest verification, and some operators."""
    model, context = (next(iter(REHEARSED)), 64) if machine.rehearsal else (next(iter(TIMED)), CONTEXT)
    return alone(model, context, machine)[:1] + operators(() if machine.rehearsal else GOALS, machine)


def operators(cases: Iterable[Case], machine: Machine) -> list[Job]:
    return [
        Job(case.name, case.op, case.modules, partial(measure, case, machine), **check.needed([case.op], machine))
        for case in cases
    ]


def against_transformers(model: str, context: int, machine: Machine) -> list[Job]:
    needs = check.needed(steps.OPERATORS, machine, texts=[PLAIN])
    return [replace(job, **needs) for job in baselines.jobs(model, context, machine)]


def alone(model: str, context: int, machine: Machine) -> list[Job]:
    """Batch 1, with the goals' context first, and there the goals' node counts first."""
    found = [Setting(model, 1, context, nodes) for nodes in ((1, NODES[-1]), NODES[:-1])]
    contexts = [] if machine.rehearsal else [c for c in CONTEXTS if c != context]
    return [steps.job(setting, machine) for setting in [*found, *(Setting(model, 1, c) for c in contexts)]]


def batched(model: str, context: int, machine: Machine) -> list[Job]:
    if machine.rehearsal:
        return [steps.job(Setting(model, 3, context), machine)]
    contexts = [context, *(c for c in CONTEXTS if c != context)]
    return [steps.job(Setting(model, rows, c), machine) for c in contexts for rows in BATCHES]


def main() -> int:
    suite = Suite(SECTION, __doc__.splitlines()[0])
    return suite.run(jobs(suite.machine), check.jobs(suite.machine))


if __name__ == "__main__":
    sys.exit(main())
