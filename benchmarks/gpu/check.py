"""Section `check`: are all operators right on this GPU, called and captured, and all texts that captured steps decode?

Operators: compared with float64 on random inputs, outputs poisoned with NaN, the plain-torch twins forbidden; then captured in
a CUDA graph, with other inputs copied in before the replay. Texts: `ladder.py`. Memory and races: `sanitize.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import failed_captures, ladder, processes, sanitize
from benchmarks.gpu.case import Case, complaint, copied, poison, poisoned, widened, without_twins
from benchmarks.gpu.cases import checked, first
from benchmarks.gpu.machine import Machine, Replay
from benchmarks.gpu.results import Job, RedError

OF_FIGURES = (torch.float32, torch.bfloat16)  # figures are taken in bfloat16; float32 shows errors best


@torch.no_grad()
def check(case: Case, dtype: torch.dtype, machine: Machine) -> dict[str, Any]:
    """Check one operator. Raises RedError."""
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
    """The errors of a replay with other inputs than at the capture, elements that it does not write included."""
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
    """Meanwhile only kernels may run. On a CPU some operators have none."""
    return nullcontext() if machine.rehearsal else without_twins(case.twins)


def jobs(machine: Machine) -> list[Job]:
    return [*larger(machine), *processes.jobs(machine), *failed_captures.jobs(machine), *ladder.jobs(machine)]


def larger(machine: Machine) -> list[Job]:
    """Every operator at every size."""
    return [*operators(checked(machine.rehearsal), machine), *sanitize.jobs(machine)]


def operators(cases: Iterable[Case], machine: Machine, dtypes: Collection[torch.dtype] | None = None) -> list[Job]:
    """dtypes: of the inputs; None: all dtypes of an operator."""
    return [
        Job(name_of(case, dtype), group_of(case, dtype), case.modules, partial(check, case, dtype, machine))
        for case in cases
        for dtype in case.dtypes
        if dtypes is None or dtype in dtypes
    ]


def name_of(case: Case, dtype: torch.dtype) -> str:
    return f"{case.name} {str(dtype).removeprefix('torch.')}"


def group_of(case: Case, dtype: torch.dtype) -> str:
    """Checks on which no figure depends have their own group, so that they block none."""
    return case.op if dtype in OF_FIGURES else f"{case.op} {str(dtype).removeprefix('torch.')}"


def needed(operators: Sequence[str], machine: Machine, texts: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """The fields of a `Job` whose figures depend on these operators and on these drafters' greedy texts.

    Every operator at two sizes and each text once must pass before. Any other failed check of these operators blocks it too.
    """
    cases = [case for case in first(machine.rehearsal) if case.op in operators]
    names = [name_of(case, dtype) for case in cases for dtype in case.dtypes if dtype in OF_FIGURES]
    return {"needs": (*names, *map(ladder.simplest, texts)), "heeds": tuple(operators)}
