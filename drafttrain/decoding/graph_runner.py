"""Rounds run ahead of the host, which looks at their results later: as CUDA graphs, or as they are.

Shapes: B rows, A new tokens of a round, M rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, cuda

from drafttrain.decoding.step import Round, Row
from drafttrain.model.drafter import Drafter
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import Target

Made = TypeVar("Made")

GRAPHS = 32  # of a session at most; the one that was used longest ago goes first
LEAST_BOUND = 512  # positions: shorter texts share their graphs
RING = 64  # rounds at most between two looks of the host
WARM_RUNS = 2  # before a capture
TIMED = 8  # replays of each graph whose parts are timed, one by one


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds of one round's parts on the device."""

    draft: float
    verify: float
    commit: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.commit


@dataclass(frozen=True, slots=True)
class Captures:
    """Graphs made, and the seconds and bytes of device memory that they took."""

    count: int = 0
    seconds: float = 0.0
    bytes: int = 0

    def __sub__(self, earlier: Captures) -> Captures:
        return Captures(self.count - earlier.count, self.seconds - earlier.seconds, self.bytes - earlier.bytes)


@dataclass(frozen=True, slots=True)
class Launched:
    """Rounds under way. rows: waits for them, and gives the rows of each. parts: of one round, where they were timed."""

    rows: Callable[[], list[list[Row]]]
    parts: Callable[[], Shares | None]


class Ahead:
    """Launches rounds over fixed shapes: rows are filled up to a power of two, lengths bounded by another.

    capture: as one CUDA graph for each (rows, bound, depth, processors' work). Otherwise the same rounds run one operation
    after the other, on any device.
    """

    def __init__(self, round: Round, capture: bool) -> None:
        self.round, self.capture = round, capture
        self.device, self.widest = round.target.device, round.drafter.widest if round.drafter else 1
        self._graphs: dict[Hashable, _Graph] = {}
        self._pool: Any = None
        self.made = Captures()

    def launch(self, slots: Sequence[int], longest: int, limit: int | None, steps: int) -> Launched:
        """longest: positions that no row will have passed when the rounds are over, their drafts included."""
        rows = min(1 << (len(slots) - 1).bit_length(), self.round.kv.slots)
        filled = [*slots, *[self.round.kv.padding_slot] * (rows - len(slots))]
        self._bind(longest)
        if self.capture:
            return self._graph(rows, limit).launch(filled, steps, len(slots))
        slot_B = torch.tensor(filled, device=self.device)
        packed = [self.round.run(slot_B, limit).packed() for _ in range(steps)]
        return Launched(lambda: [Row.of(p[: len(slots)].tolist()) for p in packed], lambda: None)

    def _bind(self, longest: int) -> None:
        drafter = self.round.drafter
        bind((self.round.kv, *(drafter.caches(self.round.state) if drafter else [])), longest, self.widest)

    def _graph(self, rows: int, limit: int | None) -> _Graph:
        key = (rows, self.round.kv.static_length, limit, self.round.processors.kind, self.round.slots.stop.most)
        graph = self._graphs.pop(key, None)
        if graph is None:
            while len(self._graphs) >= GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            self._pool = self._pool or cuda.graph_pool_handle()
            began, held = perf_counter(), cuda.memory_reserved(self.device)
            graph = _Graph(self.round, rows, limit, self.device, self._pool)
            taken, kept = perf_counter() - began, cuda.memory_reserved(self.device) - held
            self.made = Captures(self.made.count + 1, self.made.seconds + taken, self.made.bytes + kept)
        self._graphs[key] = graph  # the latest last
        return graph


class _Graph:
    """One round of one shape, captured; each replay appends its record to a ring on the device."""

    def __init__(self, round: Round, rows: int, limit: int | None, device: torch.device, pool: Any) -> None:
        self.slot_B = torch.full((rows,), round.kv.padding_slot, device=device)
        self.device = device
        self._slots: list[int] = []
        self._events = [cuda.Event(enable_timing=True, external=True) for _ in range(4)]
        self._timed: list[Shares] = []
        packed = warmed(lambda: round.run(self.slot_B, limit).packed(), device)  # for rows that are nobody's
        self._ring = packed.new_zeros(RING, *packed.shape)
        self._next_1 = torch.zeros(1, dtype=torch.long, device=device)

        def step() -> None:
            self._ring.index_copy_(0, self._next_1, round.run(self.slot_B, limit).packed()[None])
            self._next_1.add_(1)

        with round.marked(self._events):
            self.graph = captured_graph(step, pool)

    def launch(self, slots: list[int], steps: int, rows: int) -> Launched:
        if slots != self._slots:
            self.slot_B.copy_(pinned(torch.tensor(slots)), non_blocking=True)
            self._slots = slots
        self._next_1.zero_()
        for _ in range(steps):
            self.graph.replay()
        host = pinned(torch.empty(steps, *self._ring.shape[1:], dtype=torch.long))
        host.copy_(self._ring[:steps], non_blocking=True)
        arrived = cuda.Event()
        arrived.record()
        if len(self._timed) < TIMED:  # the next replay would overwrite the events
            self._time()

        def wait() -> list[list[Row]]:
            arrived.synchronize()
            return [Row.of(step[:rows]) for step in host.tolist()]

        return Launched(wait, self._mean)

    def _time(self) -> None:
        cuda.synchronize(self.device)
        parts = [a.elapsed_time(b) / 1000 for a, b in zip(self._events, self._events[1:], strict=False)]
        self._timed.append(Shares(*parts))

    def _mean(self) -> Shares:
        known = self._timed[1:] or self._timed
        return Shares(*(sum(getattr(s, name) for s in known) / len(known) for name in ("draft", "verify", "commit")))


def capturable(target: Target, drafter: Drafter | None) -> bool:
    """Whether decode steps of this pair run as CUDA graphs."""
    return target.device.type == "cuda" and target.captured and (drafter is None or drafter.captured)


def bind(caches: Iterable[KVCache], longest: int, widest: int) -> None:
    """Fix the caches' shapes. No row exceeds `longest`, no pass has over `widest` positions. Similar lengths share a shape."""
    length = max(LEAST_BOUND, 1 << (longest - 1).bit_length())
    for kv in caches:
        kv.use_static_length(length, widest)


def warmed(work: Callable[[], Made], device: torch.device) -> Made:
    """Run what is to be captured, on another stream, as often as it takes to build and tune what first uses build and tune."""
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    with cuda.stream(stream):
        for _ in range(WARM_RUNS):
            made = work()
    cuda.current_stream(device).wait_stream(stream)
    cuda.synchronize(device)
    return made


def captured_graph(work: Callable[[], object], pool: Any = None) -> Any:
    """Work that is `warmed`, as a CUDA graph. pool: of memory that graphs share. What it reads must outlive it."""
    graph = cuda.CUDAGraph()
    # other threads (a logger's, a watchdog's) may use the device meanwhile
    with cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


def pinned(x: Tensor) -> Tensor:
    """On the host, where the device can copy from and to while the host goes on."""
    return x.pin_memory()
