"""`make gpu-check`: is every operator right on this GPU, called and captured, and is every text that captured steps decode?

Operators: against float64 on random inputs, outputs poisoned with NaN, the plain-torch twins forbidden; then captured in a CUDA
graph, with other inputs copied in before the replay. Texts: `ladder.py`. Memory and races: `sanitize.py`. Exit code 1 where
anything is red, 2 without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import ladder, processes, sanitize, wheels
from benchmarks.gpu.case import Case, complaint, copied, poison, poisoned, widened, without_twins
from benchmarks.gpu.cases import checked, first
from benchmarks.gpu.machine import Machine, Replay
from benchmarks.gpu.suite import Job, RedError, Suite
from drafttrain.ops import library

SECTION = "check"
OF_FIGURES = (torch.float32, torch.bfloat16)  # figures are taken in bfloat16; in float32 an error shows best


@torch.no_grad()
def check(case: Case, dtype: torch.dtype, machine: Machine) -> dict[str, Any]:
    """Raises RedError."""
    given = case.inputs(dtype, machine.device, seed=1)
    before = copied(given)
    with poisoned(), compiled(case, machine):
        out = case.run(given)
    machine.wait()
    if (found := complaint(case.exact(widened(before)), out)) is not None:
        raise RedError(found)
    if (found := replayed(case, dtype, machine)) is not None:
        raise RedError(f"replayed: {found}")
    return {}


def replayed(case: Case, dtype: torch.dtype, machine: Machine) -> str | None:
    """What a replay with other inputs than at the capture gets wrong, elements that it does not write included."""
    given, fresh = (case.inputs(dtype, machine.device, seed) for seed in (2, 3))
    with compiled(case, machine):
        replay = Replay(lambda: case.run(given), machine)
        for name, x in given.items():
            x.copy_(fresh[name])
        owned = {x.data_ptr() for x in given.values()}
        for x in replay.out.values():
            if x.data_ptr() not in owned:
                poison(x)
        replay.run()
    machine.wait()
    return complaint(case.exact(widened(fresh)), replay.out)


def compiled(case: Case, machine: Machine) -> Any:
    """While this lasts, only kernels will do. On a CPU some operators have none."""
    return nullcontext() if machine.rehearsal else without_twins(case.twins)


def jobs(machine: Machine) -> list[Job]:
    return [*larger(machine), *processes.jobs(machine), *ladder.jobs(machine)]


def larger(machine: Machine) -> list[Job]:
    """Every operator at every size."""
    return [*operators(checked(machine.rehearsal), machine), *sanitize.jobs(machine)]


def operators(cases: Iterable[Case], machine: Machine, dtypes: Collection[torch.dtype] | None = None) -> list[Job]:
    """dtypes: of the inputs; None: all that an operator takes."""
    return [
        Job(name_of(case, dtype), group_of(case, dtype), case.modules, partial(check, case, dtype, machine))
        for case in cases
        for dtype in case.dtypes
        if dtypes is None or dtype in dtypes
    ]


def name_of(case: Case, dtype: torch.dtype) -> str:
    return f"{case.name} {str(dtype).removeprefix('torch.')}"


def group_of(case: Case, dtype: torch.dtype) -> str:
    """Checks that no figure rests on have a group of their own, so that they block none."""
    return case.op if dtype in OF_FIGURES else f"{case.op} {str(dtype).removeprefix('torch.')}"


def needed(operators: Sequence[str], machine: Machine, texts: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """The fields of a `Job` whose figures rest on these operators, and on these drafters' greedy texts: what has to pass
    before is every operator at two sizes and each text once; whatever else of these operators is red blocks it, too.
    """
    cases = [case for case in first(machine.rehearsal) if case.op in operators]
    names = [name_of(case, dtype) for case in cases for dtype in case.dtypes if dtype in OF_FIGURES]
    return {"needs": (*names, *map(ladder.simplest, texts)), "heeds": tuple(operators)}


def main() -> int:
    suite = Suite(SECTION, __doc__.splitlines()[0])
    wheels.announce()  # for what several processes do
    state = library.state_on(suite.machine.device)
    print(f"operators: {state.text}", flush=True)
    if not state.loaded and not suite.machine.rehearsal:
        print("red: without them there is nothing to check", file=sys.stderr)
        return 1
    return suite.run(jobs(suite.machine))


if __name__ == "__main__":
    sys.exit(main())
