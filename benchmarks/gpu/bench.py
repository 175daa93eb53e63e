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

from benchmarks.gpu import baselines, check, drafting, steps
from benchmarks.gpu.case import Case
from benchmarks.gpu.cases import BATCHES, BEYOND, CONTEXTS, GOALS, NODES, timed
from benchmarks.gpu.ladder import PLAIN
from benchmarks.gpu.machine import Machine, Replay, ceilings, nbytes, race
from benchmarks.gpu.models import REHEARSED, TIMED
from benchmarks.gpu.steps import Setting
from benchmarks.gpu.suite import Job, Suite
from drafttrain.targets.quantised import FP8

SECTION = "bench"
OTHERS = tuple(baselines.MAKERS)
CONTEXT = 4096  # of the goals
MAIN = ("eagle3", "medusa", "jetspec", "dflash2", "domino", "xpress")  # drafters
REPEATS = 20
MOST_SETS, MOST_BYTES = 24, 12 << 30  # of the inputs that are used in turn
CALLS, REPLAYS = 24, 10  # of a graph, and of graphs between two events


@torch.no_grad()
def measure(case: Case, machine: Machine) -> dict[str, Any]:
    """Microseconds of one call. `CALLS` calls or more are captured in one graph, on several inputs in turn, and the graph is
    replayed several times, so that the gaps between graphs do not count.
    """
    dtype, above = case.dtypes[-1], ceilings(machine).look()
    sets = [case.inputs(dtype, machine.device, seed=0)]
    moved, operations = case.moved(dtype), case.operations()
    wanted = -(-2 * machine.cached // moved)  # so that large inputs have left the cache before they are used again
    sets += [case.inputs(dtype, machine.device, seed) for seed in range(1, most_sets(wanted, nbytes(sets[0].values())))]
    rounds = -(-CALLS // len(sets))
    replay = Replay(lambda: [case.run(given) for _ in range(rounds) for given in sets], machine)
    taken = race({"op": lambda: replay.seconds(REPLAYS)}, REPEATS)["op"] / rounds / len(sets)
    floor = max(moved / above.bandwidth, operations / above.flops)
    figures = {"us": 1e6 * taken, "bytes": moved, "operations": operations, "roofline_share": floor / taken}
    return figures | {"cold": len(sets) >= wanted, "sets": len(sets)} | above.figures


def most_sets(wanted: int, size: int) -> int:
    return max(1, min(wanted, MOST_SETS, MOST_BYTES // size))


def jobs(machine: Machine) -> list[Job]:
    """All jobs, the most important first, then model by model."""
    first, *others = REHEARSED if machine.rehearsal else TIMED
    context = 64 if machine.rehearsal else CONTEXT
    found = goals(machine) + quantised(machine) + against_transformers(first, context, machine)
    more = drafting.jobs(machine) + operators(timed(machine.rehearsal), machine)
    found += [job for job in more if job.name not in {named.name for named in found}]
    found += alone(first, context, machine)[1:] + batched(first, context, machine)
    for model in others:
        found += (
            alone(model, context, machine) + against_transformers(model, context, machine) + batched(model, context, machine)
        )
    return found


def goals(machine: Machine) -> list[Job]:
    """The jobs with goals: the plain step, the largest verification, some operators, the main drafters, filters of sampling."""
    model, context = (next(iter(REHEARSED)), 64) if machine.rehearsal else (next(iter(TIMED)), CONTEXT)
    sampled = steps.job(Setting(model, 1, context, (1, NODES[-1]), sampled=True), machine)
    main = [drafting.job(name, machine) for name in MAIN]
    plain = alone(model, context, machine)[:1]
    return [*plain, *operators(() if machine.rehearsal else GOALS, machine), *main, sampled]


def quantised(machine: Machine) -> list[Job]:
    """Steps of the target that teams deploy: a bfloat16 drafter takes more of them."""
    model, context = (next(iter(REHEARSED)), 64) if machine.rehearsal else (next(iter(TIMED)), CONTEXT)
    return [steps.job(Setting(model, 1, context, (1, NODES[-1]), weights=FP8), machine), drafting.job(MAIN[0], machine, FP8)]


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
    found = [Setting(model, 1, context, nodes) for nodes in ((1, NODES[-1]), NODES[:-1], (1, *BEYOND))]
    contexts = [] if machine.rehearsal else [c for c in CONTEXTS if c != context]
    return [steps.job(setting, machine) for setting in [*found, *(Setting(model, 1, c) for c in contexts)]]


def batched(model: str, context: int, machine: Machine) -> list[Job]:
    if machine.rehearsal:
        return [steps.job(Setting(model, 3, context, ragged=ragged), machine) for ragged in (False, True)]
    contexts = [context, *(c for c in CONTEXTS if c != context)]
    uneven = [Setting(model, rows, context, ragged=True) for rows in BATCHES]
    return [
        steps.job(setting, machine) for setting in [*(Setting(model, rows, c) for c in contexts for rows in BATCHES), *uneven]
    ]


def main() -> int:
    suite = Suite(SECTION, __doc__.splitlines()[0])
    return suite.run(jobs(suite.machine), check.jobs(suite.machine))


if __name__ == "__main__":
    sys.exit(main())
