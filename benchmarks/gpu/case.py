"""A checked and timed operator: inputs of a size, the call, the expected result in float64, and the bytes it must move.

Shapes: B rows, N tree nodes, M rows of logits, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling, shaped

Tensors = dict[str, Tensor]

# of ||out - exact|| / ||exact||, and of the greatest difference / the greatest entry, by the output's dtype
TOLERANCE = {torch.float32: (2e-5, 2e-4), torch.float16: (2e-3, 8e-3), torch.bfloat16: (1e-2, 4e-2)}
DRAWN = 1e-5  # rounding that a number may be outside the sampled token's share, of a distribution's mass


@dataclass(frozen=True, slots=True)
class Draw:
    """An expected token: the one whose share of p_MV contains the number uniform_M."""

    p_MV: Tensor
    uniform_M: Tensor

    def complaint(self, token_M: Tensor) -> str | None:
        upper_MV, token_M1 = self.p_MV.cumsum(-1), token_M.view(-1, 1)
        share_M, upper_M = self.p_MV.gather(1, token_M1)[:, 0], upper_MV.gather(1, token_M1)[:, 0]
        at_M, slack_M = self.uniform_M * upper_MV[:, -1], DRAWN * upper_MV[:, -1]
        fits_M = (share_M > 0) & (at_M >= upper_M - share_M - slack_M) & (at_M <= upper_M + slack_M)
        return None if bool(fits_M.all()) else f"{int((~fits_M).sum())} of {len(fits_M)} drawn elsewhere"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Expected choices: the largest values in order, as far as a product's rounding allows to tell."""

    value_MV: Tensor
    rounding: float

    def complaint(self, index_Mk: Tensor) -> str | None:
        index_Mk = index_Mk.flatten(0, -2)
        best_Mk = self.value_MV.topk(index_Mk.shape[1], -1).values
        gap = (best_Mk - self.value_MV.gather(1, index_Mk)).abs().max() / self.value_MV.abs().max()
        twice = any(len(set(row)) < len(row) for row in index_Mk.tolist())
        return "a choice stands twice" if twice else None if gap <= self.rounding else f"ranks are off by {float(gap):.1e}"


@dataclass(frozen=True, slots=True)
class Kept:
    """Expected logits, with minus infinity for dropped tokens: at least these stay and at most those, as rounding decides."""

    least_MV: Tensor
    most_MV: Tensor

    @staticmethod
    def of(logits_MV: Tensor, sampling: Sampling) -> Kept:
        """For logits in float64: what stays with top-p and min-p a little to either side."""

        def shifted(share: float) -> Tensor:
            top_p = sampling.top_p if sampling.top_p == 1.0 else sampling.top_p - share
            return shaped(logits_MV, replace(sampling, top_p=top_p, min_p=sampling.min_p * (1.0 + share)))

        return Kept(shifted(DRAWN), shifted(-DRAWN))

    def complaint(self, out_MV: Tensor) -> str | None:
        lost_MV = (self.least_MV > -torch.inf) & (out_MV == -torch.inf)
        wrong_MV = (out_MV > -torch.inf) & (out_MV != self.most_MV) | out_MV.isnan()
        bad = int((lost_MV | wrong_MV).sum())
        return f"{int(lost_MV.sum())} tokens lost, {int(wrong_MV.sum())} kept or changed" if bad else None


Expected = Tensor | Draw | Kept | Ranks


class Case(ABC):
    """An operator at one size. Subclasses are frozen dataclasses. An output may be an input that is written in place."""

    op: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)  # the last is timed
    twins: ClassVar[tuple[str, ...]]  # plain-torch twins that must not run where kernels exist

    @property
    def name(self) -> str:
        size = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return " ".join(
            [self.op, *(f"{key}={value}" for key, value in size.items() if value is not None and value is not False)]
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules from which the operator's sources are found."""
        return tuple(dict.fromkeys(twin.rpartition(".")[0] for twin in self.twins))

    @abstractmethod
    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        """Random inputs, of the same shapes for every seed."""

    @abstractmethod
    def run(self, given: Tensors) -> Tensors:
        """The public operator's outputs, by name."""

    @abstractmethod
    def exact(self, wide: Tensors) -> dict[str, Any]:
        """The outputs in float64, or whole numbers, from inputs in float64, which it may overwrite."""

    @abstractmethod
    def moved(self, dtype: torch.dtype) -> int:
        """Bytes that must be read and written once each, at least; the docstring of a subclass says which."""

    def operations(self) -> float:
        """Of its matrix products, two for each multiplication; 0 where memory alone limits it."""
        return 0.0


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def copied(given: Tensors) -> Tensors:
    return {name: x.clone() for name, x in given.items()}


def widened(given: Tensors) -> Tensors:
    """Copies in float64."""
    return {name: x.double() if x.is_floating_point() else x.clone() for name, x in given.items()}


def complaint(expected: dict[str, Expected], out: Tensors) -> str | None:
    """The first error in the outputs; None if they are right. NaN is always an error."""
    for name, wanted in expected.items():
        found = agreement(wanted, out[name])
        if found is not None:
            return f"{name}: {found}"
    return None


def agreement(wanted: Expected, out: Tensor) -> str | None:
    if isinstance(wanted, Draw | Kept | Ranks):
        return wanted.complaint(out)
    if wanted.shape != out.shape:
        return f"its shape is {tuple(out.shape)}, not {tuple(wanted.shape)}"
    if not out.is_floating_point():
        wrong = int((out != wanted).sum())
        return f"{wrong} of {out.numel()} differ" if wrong else None
    if not out.numel():
        return None
    apart = out.double() - wanted
    norm, greatest = wanted.norm().clamp_min(1e-30), wanted.abs().max().clamp_min(1e-30)
    relative, worst = float(apart.norm() / norm), float(apart.abs().max() / greatest)
    allowed, peak = TOLERANCE[out.dtype]
    return None if relative <= allowed and worst <= peak else f"off by {relative:.1e} of its norm, {worst:.1e} at worst"


@contextmanager
def poisoned() -> Iterator[None]:
    """Meanwhile fresh tensors hold NaN, so that elements that a kernel forgets are seen."""
    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            original = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, _poisoning(original)))
        yield


def _poisoning(original: Any) -> Any:
    return lambda *arguments, **named: poison(original(*arguments, **named))


def poison(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return x.fill_(True)
    if x.is_floating_point():
        return x.fill_(torch.nan)
    return x.fill_(-77 if x.dtype.is_signed else 77)


@contextmanager
def without_twins(twins: tuple[str, ...]) -> Iterator[None]:
    """Meanwhile an operator that falls back on its plain-torch twin raises."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the plain-torch twin ran where a kernel should")

    with ExitStack() as stack:
        for twin in twins:
            stack.enter_context(mock.patch(twin, refuse))
        yield


def random_parents(rows: int, nodes: int, device: torch.device, seed: int) -> Tensor:
    """[B, N]: any earlier node may be a node's parent; -1 for the root."""
    share_BN = torch.rand(rows, nodes, device=device, generator=generator(device, seed))
    node_N = torch.arange(nodes, device=device)
    parent_BN = torch.minimum((share_BN * node_N).long(), (node_N - 1).clamp_min(0))
    parent_BN[:, 0] = -1
    return parent_BN


def paged(rows: int, positions: int, page: int, device: torch.device, seed: int) -> tuple[int, Tensor]:
    """(number of pages, table_BQ): each row's own pages, in random order."""
    each = -(-positions // page)
    return rows * each, torch.randperm(rows * each, device=device, generator=generator(device, seed)).view(rows, each)


def ragged(rows: int, longest: int, device: torch.device, seed: int) -> Tensor:
    """[B] lengths up to `longest`, which the first row has."""
    length_B = torch.randint(0, longest + 1, (rows,), device=device, generator=generator(device, seed))
    length_B[0] = longest
    return length_B
