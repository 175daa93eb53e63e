"""Whole decode steps with drafters of published shapes: draft, verify, commit. With random weights few drafts are accepted.

For a target of a real size, at batch 1 after a prompt of random tokens, compared with plain decoding of the same target. The
cost of a step does not depend on the accepted drafts, so it gives the acceptance that a drafter needs for a speedup.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu import check, sources, steps
from benchmarks.gpu.ladder import PLAIN
from benchmarks.gpu.machine import WARM, Machine, ceilings, race
from benchmarks.gpu.models import REHEARSED, TIMED
from benchmarks.gpu.results import Job, SkipError
from benchmarks.gpu.steps import Launches, Setting, Shared, Station, named, target_of
from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.graph_runner import TIMED as TIMED_LAUNCHES
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import families
from drafttrain.measure.speed import step_bytes
from drafttrain.model.drafter import Drafter
from drafttrain.targets.fast import FastTarget

CONTEXT = 4096
REPEATS = 5
NODES = 59  # of a tree that grows by confidence, as published for EAGLE-2 and EAGLE-3
STATIC = 63  # drafts of a static tree, as published for Medusa
OPERATORS = (*steps.OPERATORS, "build_tree", "grow_tree", "top", "top_log", "residual_heads")


@dataclass(frozen=True, slots=True)
class Shape:
    """A drafter as it was published, or as close as our options allow."""

    options: dict[str, Any] = field(default_factory=dict)
    static: int = 0  # depth of a static tree of `STATIC` drafts; 0: none


SHAPES: dict[str, Shape] = {
    "eagle": Shape({"tree": "dynamic", "nodes": NODES, "draft_length": 6}),
    "eagle3": Shape({"tree": "dynamic", "nodes": NODES, "draft_length": 6, "draft_vocab": 32_000}),
    "medusa": Shape({"heads": 3}, static=3),
    "hydra": Shape({"heads": 4, "layers": 4, "prefix_layer": True}, static=4),
    "mlp_speculator": Shape({"n_predict": 4, "inner_dim": 3072, "scale_input": True, "tree": "chain"}),
    "redrafter": Shape({"width": 10, "length": 5}),
    "mtp": Shape({"draft_length": 3, "steps": 3}),
    "mtp_native": Shape({"source": "fresh", "draft_length": 3, "steps": 3}),
    "peagle": Shape({"draft_length": 8, "layers": 4, "draft_vocab": 32_000}),
    "draft_model": Shape({"source": "scratch", "blocks": 16, "hidden_size": 2048, "draft_length": 5}),
    "pard": Shape({"source": "scratch", "blocks": 16, "hidden_size": 2048, "draft_length": 8}),
    "early_exit": Shape({"draft_length": 4}),
}
TINY = {"draft_vocab": 32, "inner_dim": 16, "blocks": 2, "hidden_size": 32, "nodes": 9}


@dataclass(frozen=True, slots=True)
class Size:
    model: str
    context: int
    steps: int  # of one timed run
    repeats: int


def size_of(machine: Machine) -> Size:
    if machine.rehearsal:
        return Size(next(iter(REHEARSED)), 24, 2, 1)
    return Size(next(iter(TIMED)), CONTEXT, steps.STEPS, REPEATS)


def likely(depth: int, count: int) -> list[list[int]]:
    """This many rank paths of a static tree, low ranks first. Rank r at any depth counts as 1 / (r + 1) as likely as rank 0.

    The prefixes of every path are included, since they are likelier.
    """
    ranks = [path for length in range(1, depth + 1) for path in product(range(10), repeat=length)]
    ranks.sort(key=lambda path: (sum(rank + 1 for rank in path), len(path), path))
    return [list(path) for path in ranks[:count]]


def built(name: str, target: FastTarget, machine: Machine) -> Drafter:
    """Raises SkipError for a drafter that cannot be built for this target, or that no graph can hold."""
    family, shape = families()[name], SHAPES.get(name, Shape())
    options = dict(shape.options)
    if machine.rehearsal:
        options = {key: TINY.get(key, value) for key, value in options.items()}
    if shape.static:
        options |= {"tree": "static", "paths": likely(shape.static, STATIC)}
    torch.manual_seed(0)
    try:
        with machine.device:
            drafter = family.build(family.options(**options), target)
    except (UserError, ValueError) as error:
        raise SkipError(f"not for this target: {error}") from error
    if not drafter.captured:
        raise SkipError("no graph can hold its steps")
    drafter = drafter.to(machine.device, target.dtype).eval().requires_grad_(False)
    drafter.prepare(lambda: torch.arange(target.shape.vocab_size))
    return drafter


class Drafting(Launches):
    """One request in decode steps that are launched ahead of the host. Each step continues the one before."""

    def __init__(self, target: FastTarget, drafter: Drafter, size: Size, machine: Machine) -> None:
        runs = TIMED_LAUNCHES + 1 + (WARM + size.repeats) * size.steps
        room = (runs + 2) * (1 + drafter.draft_length)
        decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=room, controls=Controls(read_every=1))
        draw = torch.Generator().manual_seed(0)
        request = decoder.request(torch.randint(target.shape.vocab_size, (size.context,), generator=draw).tolist())
        longest = decoder.positions(request)
        if longest > target.shape.max_positions:
            raise SkipError(f"{longest} positions exceed the target's {target.shape.max_positions}")
        session = Session(decoder, 1, longest)
        session.submit(request)
        session.step()  # reads the prompt
        super().__init__(session, 1, longest, size.steps, machine)

    @property
    def nodes(self) -> int:
        """Nodes of the last step's tree, the last accepted token included."""
        assert self.launched is not None
        return self.launched.rows()[-1][0].nodes


def measure(name: str, machine: Machine, weights: str | None = None) -> dict[str, Any]:
    """Milliseconds of a whole step, of its draft and of a plain step. Raises SkipError."""
    above, size = ceilings(machine).look(), size_of(machine)
    target = target_of(size.model, machine, weights)
    drafter = built(name, target, machine)
    drafting = Drafting(target, drafter, size, machine)
    plain = Station(Shared(target), Setting(size.model, 1, size.context), 1, machine)
    taken = race({"step": drafting.seconds, "plain": plain.seconds}, size.repeats)
    step, alone = taken["step"], taken["plain"]
    moved = step_bytes(target.cache_bytes(), drafting.weight_bytes, 1, size.context)
    found = {"ms": 1e3 * step, "plain_ms": 1e3 * alone, "over_plain": step / alone, "nodes": drafting.nodes}
    found |= {"draft_length": drafter.draft_length, "parameters": sum(p.numel() for p in drafter.parameters())}
    found |= {"weight_bytes": drafting.weight_bytes, "floor_share": moved / above.bandwidth / step} | above.figures
    return found if drafting.parts is None else found | {"draft_ms": 1e3 * drafting.parts.draft}


def jobs(machine: Machine) -> list[Job]:
    """All families, those with a published shape first."""
    return [job(name, machine) for name in dict.fromkeys([*SHAPES, *families()])]


def job(name: str, machine: Machine, weights: str | None = None) -> Job:
    """weights: how the target is quantised; the drafter is not."""
    size, modules = size_of(machine), (*sources.DECODER, *sources.of_family(name))
    needs = check.needed((*OPERATORS, *steps.operators(weights)), machine, texts=(PLAIN, name))
    case = f"drafting {name} {size.model} context={size.context}{named(weights)}"
    return Job(case, "drafters' steps", modules, partial(measure, name, machine, weights), **needs)
