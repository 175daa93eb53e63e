"""Decode steps of models of real shapes with random weights: plain, and verifying trees, after a given context.

The steps are the decoder's own, captured and replayed by it. Prompts are not read: the cache holds random numbers, and its
lengths are set to the context before every timed run. Weights are far larger than any cache, so nothing is flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import check
from benchmarks.gpu.cases import NODES
from benchmarks.gpu.ladder import PLAIN
from benchmarks.gpu.machine import Machine, ceilings, race, waits
from benchmarks.gpu.models import REHEARSED, TIMED, random_model
from benchmarks.gpu.results import Job, RedError, SkipError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, Path, TreeShape
from drafttrain.decoding.graph_runner import TIMED as TIMED_LAUNCHES
from drafttrain.decoding.graph_runner import Launched
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.measure.speed import step_bytes
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter, DraftState
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.kv_storage import PAGE
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import Taps
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.quantised import quantise, why_slow

STEPS = 16  # of one timed run
REPEATS = 10
ROOM = 8 * PAGE  # positions beyond the context: a run's new tokens, and a tree
MARGIN = 6 << 30  # bytes left to activations and graphs
TRACED = (1, 64)
OPERATORS = ("rms_norm", "gated", "append", "tree_attention", "kv_keep", "greedy_accept", "commit", "tree_links")


FILTERS: dict[str, dict[str, Any]] = {"": {}, "top_p=0.9": {"top_p": 0.9}, "top_k=50": {"top_k": 50}}  # of sampling


@dataclass(frozen=True, slots=True)
class Setting:
    model: str
    rows: int
    context: int  # of every row; of ragged ones the longest
    nodes: tuple[int, ...] = NODES  # 1 among them: plain decoding, which the others are compared with
    sampled: bool = False  # losslessly at temperature 1, with each of `FILTERS`; otherwise greedy
    ragged: bool = False  # row i of B has i + 1 of B parts of the context
    weights: str | None = None  # how the target is quantised, as `target.weights`

    @property
    def name(self) -> str:
        part = "" if self.nodes == NODES else f" nodes={','.join(map(str, self.nodes))}"
        how = f"{' ragged' * self.ragged}{' sampled' * self.sampled}{named(self.weights)}"
        return f"step {self.model} rows={self.rows} context={self.context}{part}{how}"

    @property
    def contexts(self) -> list[int]:
        """Positions of each row."""
        return [self.context * (row + 1) // self.rows if self.ragged else self.context for row in range(self.rows)]

    @property
    def contenders(self) -> list[tuple[str, int, dict[str, Any]]]:
        """(name, nodes, filter) of what is timed in turn."""
        filters = FILTERS if self.sampled else {"": {}}
        return [(f"{nodes} {name}".strip(), nodes, options) for name, options in filters.items() for nodes in self.nodes]


def named(weights: str | None) -> str:
    """The part of a case's name that tells how its target is quantised."""
    return "" if weights is None else f" weights={weights}"


class Offered(Drafter):
    """Proposes the same drafts every time at no cost, so that only the cost of their verification is measured."""

    def __init__(self, nodes: int, vocab: int, device: torch.device) -> None:
        shape = TreeShape.of(binary(nodes)).to(device)
        super().__init__(Proposal(shape.max_depth, shape.paths))
        self.taps, self.shape = Taps(), shape
        self.draft_1M = torch.randint(vocab, (1, nodes - 1), device=device)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        raise AssertionError("it is not trained")

    def open(self, slots: int, max_len: int) -> OfferedState:
        return OfferedState(self, slots)


class OfferedState(DraftState):
    def __init__(self, drafter: Offered, slots: int) -> None:
        self.drafter, self.root_S = drafter, torch.zeros(slots, dtype=torch.long, device=drafter.draft_1M.device)

    def reset(self, slot_R: Tensor) -> None:
        self.root_S[slot_R] = 0

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        self.root_S[slot_B] = commit.root_B

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        token_BN = torch.cat([self.root_S[slot_B][:, None], self.drafter.draft_1M.expand(len(slot_B), -1)], 1)
        return DraftTree.static(token_BN, self.drafter.shape)


def binary(nodes: int) -> list[Path]:
    """Rank paths of a complete binary tree with this many nodes, root included."""
    found: list[Path] = [()]
    for node in range(1, nodes):
        found.append((*found[(node - 1) // 2], (node - 1) % 2))
    return found[1:]


class Shared:
    """The target, whose sessions share one cache in turn."""

    def __init__(self, target: FastTarget) -> None:
        self._target = target
        self._kv: KVCache | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._target(*arguments, **named)

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        if self._kv is None:
            self._kv = self._target.new_cache(slots, max_len, pages)
            view = self._kv.page_view()
            assert view is not None
            view.store.normal_()
        assert self._kv.slots == slots and self._kv.max_len >= max_len
        return self._kv


class Launches:
    """Decode steps that a session's runner launches ahead of the host, `count` in one timed run."""

    def __init__(self, session: Session, rows: int, longest: int, count: int, machine: Machine) -> None:
        assert session.runner is not None
        self.runner, self.machine = session.runner, machine
        self.rows, self.longest, self.count = rows, longest, count
        self.launched: Launched | None = None
        self.stand()
        for _ in range(TIMED_LAUNCHES + 1):  # captures, then times the parts; each of these waits
            self.launch(1)

    def stand(self) -> None:
        """Prepare a run."""

    @torch.inference_mode()
    def launch(self, steps: int) -> None:
        self.launched = self.runner.launch(range(self.rows), self.longest, None, steps)

    def seconds(self) -> float:
        """Seconds of one step, from several in a row."""
        self.stand()
        self.machine.wait()
        return self.machine.seconds(partial(self.launch, self.count)) / self.count

    @property
    def weight_bytes(self) -> int:
        """That one step reads, as counted at its capture; 0 without a graph."""
        return self.launched.weight_bytes if self.launched else 0

    @property
    def parts(self) -> Any:
        """Seconds of one step's parts; None without graph timings."""
        return self.launched.parts() if self.launched else None


class Station(Launches):
    """A session whose rows are at their contexts, as if their prompts had been read. nodes 1: plain decoding. options: of the
    sampling.
    """

    def __init__(
        self, target: Shared, setting: Setting, nodes: int, machine: Machine, options: dict[str, Any] | None = None
    ) -> None:
        self.setting, self.nodes = setting, nodes
        drafter = None if nodes == 1 else Offered(nodes, target.shape.vocab_size, machine.device)
        sampling = Sampling(1.0, **options or {}) if setting.sampled else Sampling()
        policy = "lossless" if setting.sampled else "greedy"
        decoder = Decoder(target, drafter, policy, sampling, controls=Controls(read_every=1))
        self.session = Session(decoder, setting.rows, setting.context + ROOM)
        longest = setting.context + STEPS * decoder.reach + (drafter.max_new_positions if drafter else 1)
        assert longest <= setting.context + ROOM
        super().__init__(self.session, setting.rows, longest, STEPS, machine)

    @torch.inference_mode()
    def stand(self) -> None:
        rows, slots = self.setting.rows, self.session.slots
        for slot, context in enumerate(self.setting.contexts):
            self.session.kv.crop_slot(slot, context)
        slots.done_S[:rows], slots.made_S[:rows], slots.limit_S[:rows] = False, 1, 1 << 40
        slots.root_S[:rows] = torch.arange(rows, device=self.machine.device)

    def figures(self) -> dict[str, Any]:
        """Figures other than times. Raises RedError where the steps did not continue the texts correctly."""
        self.stand()
        seen = waits(partial(self.launch, STEPS), self.machine) if self.nodes in TRACED else None
        if seen is None:
            self.launch(STEPS)
        assert self.launched is not None
        made = [sum(row.count for row in rows) for rows in zip(*self.launched.rows(), strict=True)]
        grown = (self.session.kv.lengths(torch.arange(self.setting.rows)).cpu() - torch.tensor(self.setting.contexts)).tolist()
        if made != grown or min(grown) < STEPS:
            raise RedError(f"{STEPS} steps of {self.nodes} nodes made {made} tokens and kept {grown} positions")
        found: dict[str, Any] = {"capture_seconds": self.runner.made.seconds, "capture_bytes": self.runner.made.bytes}
        if seen is not None:
            found |= {"waits": seen[0], "replays": seen[1]}
        return found


@lru_cache(maxsize=1)
def target_of(model: str, machine: Machine, weights: str | None = None) -> FastTarget:
    """The target. The last one is kept, since settings come model by model."""
    config = (REHEARSED if machine.rehearsal else TIMED)[model]
    made = random_model(config, torch.bfloat16, machine.device)
    if weights is not None:
        quantise(made, weights, machine.device)
        if not machine.rehearsal and (reason := why_slow(made)):
            raise SkipError(reason)
    return FastTarget(made)


def operators(weights: str | None) -> tuple[str, ...]:
    """Those that steps of a target with such weights run."""
    return OPERATORS if weights is None else (*OPERATORS, "fp8_rows", "fp8")


def measure(setting: Setting, machine: Machine) -> dict[str, Any]:
    """By contender: milliseconds, share of the floor, ratio to plain. Raises SkipError where it does not fit."""
    above, target = ceilings(machine).look(), target_of(setting.model, machine, setting.weights)
    cache = target.cache_bytes()
    if not machine.rehearsal and cache.position * setting.rows * (setting.context + ROOM) + MARGIN > machine.free:
        raise SkipError("its cache does not fit the GPU's memory")
    shared = Shared(target)
    stations = {name: Station(shared, setting, nodes, machine, options) for name, nodes, options in setting.contenders}
    taken = race({name: station.seconds for name, station in stations.items()}, REPEATS)
    figures: dict[str, Any] = above.figures
    for name, station in stations.items():
        step, moved = taken[name], step_bytes(cache, station.weight_bytes, setting.rows, sum(setting.contexts))
        found = {"ms": 1e3 * step, "floor_share": moved / above.bandwidth / step, "over_plain": step / taken["1"]}
        found["weight_bytes"] = station.weight_bytes
        found["over_unfiltered"] = step / taken[str(station.nodes)]
        if station.parts is not None:
            found["outside_target"] = max(0.0, 1.0 - station.parts.verify / step)
        figures[name] = found | station.figures()
    return figures


def job(setting: Setting, machine: Machine) -> Job:
    needs = check.needed(
        operators(setting.weights), machine, texts=(PLAIN, "medusa")
    )  # one that verifies a chain of one, one that verifies trees
    return Job(setting.name, f"steps {setting.model}", "decoder", partial(measure, setting, machine), **needs)
