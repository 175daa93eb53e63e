"""Section `bench`: the speed of the operators and of the decode steps on this GPU, compared with its memory bandwidth.

Every figure depends on the checks of its own operators and on a few texts. Checks that have not run yet run first, and a
figure with a failed check is not measured. The figures that have goals come first. docs/performance.md explains each figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import check, drafting, steps
from benchmarks.gpu.case import Case
from benchmarks.gpu.cases import BATCHES, BEYOND, CONTEXTS, GOALS, NODES, timed
from benchmarks.gpu.machine import Machine, Replay, ceilings, race
from benchmarks.gpu.models import REHEARSED, TIMED
from benchmarks.gpu.results import Job
from benchmarks.gpu.steps import Setting
from drafttrain.targets.quantised import FP8

SECTION = "bench"
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
    count = min(wanted, MOST_SETS, MOST_BYTES // sum(x.nbytes for x in sets[0].values()))
    sets += [case.inputs(dtype, machine.device, seed) for seed in range(1, count)]
    rounds = -(-CALLS // len(sets))
    replay = Replay(lambda: [case.run(given) for _ in range(rounds) for given in sets], machine)
    taken = race({"op": lambda: replay.seconds(REPLAYS)}, REPEATS)["op"] / rounds / len(sets)
    floor = max(moved / above.bandwidth, operations / above.flops)
    figures = {"us": 1e6 * taken, "bytes": moved, "operations": operations, "roofline_share": floor / taken}
    return figures | {"cold": len(sets) >= wanted, "sets": len(sets)} | above.figures


def jobs(machine: Machine) -> list[Job]:
    """All jobs, the most important first."""
    found = goals(machine) + variants(machine) + drafting.jobs(machine) + operators(timed(machine.rehearsal), machine)
    found += [steps.job(setting, machine) for setting in settings(machine)]
    return list({job.name: job for job in found}.values())


def sizes(machine: Machine) -> tuple[list[str], int]:
    """The models, that of the goals first, and the goals' context."""
    return ([*REHEARSED], 64) if machine.rehearsal else ([*TIMED], CONTEXT)


def settings(machine: Machine) -> list[Setting]:
    """The goals' model at the goals' context first; then other models, other contexts."""
    (first, *others), context = sizes(machine)
    batches, contexts = ((3,), ()) if machine.rehearsal else (BATCHES, CONTEXTS)
    found = [*alone(first, context), *(Setting(first, rows, context, ragged=r) for r in (False, True) for rows in batches)]
    found += [alone(model, context)[0] for model in others]
    found += [Setting(first, rows, c) for c in contexts if c != context for rows in (1, *batches)]
    for model in others:
        found += [*alone(model, context)[1:], *(Setting(model, rows, context) for rows in batches)]
    return found


def alone(model: str, context: int) -> list[Setting]:
    """Batch 1, with the goals' node counts first."""
    return [Setting(model, 1, context, nodes) for nodes in ((1, NODES[-1]), NODES[:-1], (1, *BEYOND))]


def goals(machine: Machine) -> list[Job]:
    """The jobs with goals: the plain step, the largest verification, some operators, the main drafters, filters of sampling."""
    (model, *_), context = sizes(machine)
    plain = steps.job(alone(model, context)[0], machine)
    sampled = steps.job(Setting(model, 1, context, (1, NODES[-1]), sampled=True), machine)
    main = [drafting.job(name, machine) for name in MAIN]
    return [plain, *operators(() if machine.rehearsal else GOALS, machine), *main, sampled]


def variants(machine: Machine) -> list[Job]:
    """The target that teams deploy, of whose steps a bfloat16 drafter takes more."""
    (model, *_), context = sizes(machine)
    fp8 = Setting(model, 1, context, (1, NODES[-1]), weights=FP8)
    return [steps.job(fp8, machine), drafting.job(MAIN[0], machine, FP8)]


def operators(cases: Iterable[Case], machine: Machine) -> list[Job]:
    return [
        Job(case.name, case.op, case.modules, partial(measure, case, machine), **check.needed([case.op], machine))
        for case in cases
    ]
