"""`make gpu-bench`: how fast are the operators and the decode steps on this GPU, against what its memory allows?

Every figure rests on the checks of its own operators and on a few texts: those of them that have not run yet run before it, and
where one is red the figure is not measured. The figures that goals name come first; when the budget of time is spent, the rest
is left to the next run. docs/performance.md says what each figure means.
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
    first, *others = REHEARSED if machine.rehearsal else TIMED
    context = 64 if machine.rehearsal else CONTEXT
    found = goals(machine) + beside(first, context, machine) + drafting.jobs(machine) + prefill.jobs(machine)
    found += [job for job in operators(timed(machine.rehearsal), machine) if job.name not in {named.name for named in found}]
    found += alone(first, context, machine)[1:] + batched(first, context, machine)
    for model in others:
        found += alone(model, context, machine) + beside(model, context, machine) + batched(model, context, machine)
    return found


def goals(machine: Machine) -> list[Job]:
    """What goals name: the plain step and the largest verification, and some operators."""
    model, context = (next(iter(REHEARSED)), 64) if machine.rehearsal else (next(iter(TIMED)), CONTEXT)
    return alone(model, context, machine)[:1] + operators(() if machine.rehearsal else GOALS, machine)


def operators(cases: Iterable[Case], machine: Machine) -> list[Job]:
    return [
        Job(case.name, case.op, case.modules, partial(measure, case, machine), **check.needed([case.op], machine))
        for case in cases
    ]


def beside(model: str, context: int, machine: Machine) -> list[Job]:
    needs = check.needed(steps.OPERATORS, machine, texts=[PLAIN])
    return [replace(job, **needs) for job in baselines.jobs(model, context, machine)]


def alone(model: str, context: int, machine: Machine) -> list[Job]:
    """Batch 1, the goals' context first; there the goals' node counts come before the others."""
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
