"""Runs decode steps ahead of the host, which reads their results later: captured as CUDA graphs, or operation by operation.

When a graph is captured, the bytes of weights that its step reads are counted, product by product (`WeightReads`).

Shapes: B rows, A new tokens of a step, X = A + 3 (`ops.kv_cache.Committed`), M steps.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, cuda
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafttrain.core.errors import one_line
from drafttrain.decoding.step import DecodeStep, StepRow
from drafttrain.model.drafter import Drafter
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import Target

Made = TypeVar("Made")

WARM_RUNS = 2  # before a capture
# Graphs of failed captures: torch's allocator of pinned memory may still refer to them (torch pull request 180395). Once they
# are reset they hold no memory of the device, and nothing of the work; a decoder makes one at most.
_failed: list[Any] = []


class CaptureError(Exception):
    """No CUDA graph can hold some work. The message is the reason, in one line."""


def warmed(work: Callable[[], Made], device: torch.device) -> Made:
    """Run work before its capture, on another stream, so that kernels are built and tuned. Gives the last result."""
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    with cuda.stream(stream):
        for _ in range(WARM_RUNS):
            output = work()
    cuda.current_stream(device).wait_stream(stream)
    cuda.synchronize(device)
    return output


def why_waiting(work: Callable[[], object]) -> str | None:
    """Where work on a GPU makes the host wait for it; None: nowhere. No graph can hold work that waits.

    Unlike a capture that fails, this leaves nothing to clean up. The work has run before: a first run may wait.
    """
    sync_mode = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        return reason_of(error)
    finally:
        cuda.set_sync_debug_mode(sync_mode)
    return None


def capturing(device: torch.device) -> bool:
    """Whether work on the current stream is captured and not run."""
    return device.type == "cuda" and bool(cuda.is_current_stream_capturing())


def captured_graph(work: Callable[[], object], device: torch.device, pool: Any = None) -> Any:
    """Capture work that is `warmed` as a CUDA graph. pool: memory that graphs share. The inputs must outlive the graph.

    Raises CaptureError where the capture fails. The process can then go on without this graph, and capture others.
    """
    graph, pool = cuda.CUDAGraph(), pool or cuda.graph_pool_handle()
    stream = cuda.current_stream(device)
    try:
        # other threads (a logger, a watchdog) may use the device at the same time
        with cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        _clean_up(graph, device, pool, stream)
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CaptureError(reason_of(_first(error))) from error
    return graph


def _clean_up(graph: Any, device: torch.device, pool: Any, stream: Any) -> None:
    """Undo what a failed capture leaves behind, of which torch undoes little if the capture cannot even be ended.

    The current stream is the capture's, the allocator still counts it as running, and in some versions so does the random
    generator, until a later capture ends well.
    """
    cuda.set_stream(stream)
    _failed.append(graph)
    graph.reset()
    with suppress(RuntimeError):  # the capture was ended, and this with it
        end_pool(device, pool)
    count_1 = torch.zeros(1, device=device)
    cuda.synchronize(device)
    with cuda.graph(cuda.CUDAGraph(), capture_error_mode="thread_local"):
        count_1.add_(1)


def end_pool(device: torch.device, pool: Any) -> None:
    """Allocate from this pool no more, and give it back. Raises RuntimeError where nothing is allocated from it."""
    device_index = cuda.current_device() if device.index is None else device.index
    torch._C._cuda_endAllocateToPool(device_index, pool)
    torch._C._cuda_releasePool(device_index, pool)


def _first(error: BaseException) -> BaseException:
    """The error that came first: ending a capture that has failed is an error too."""
    while error.__context__ is not None:
        error = error.__context__
    return error


CAPTURING = ("captured_graph", "why_waiting")  # every error of a capture has passed them


def reason_of(error: BaseException) -> str:
    """An error and its place in our code or in transformers', in one line."""
    frames = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.name not in CAPTURING]
    package_frames = [(path.name, line) for path, line in frames if {"drafttrain", "transformers"} & set(path.parts)]
    location = f"{package_frames[-1][0]}, line {package_frames[-1][1]}: " if package_frames else ""
    return f"{location}{one_line(str(error))[:120]}"


GRAPHS = 32  # of a session at most; the least recently used one is dropped first
LEAST_BOUND = 512  # positions: shorter texts share their graphs
RING = 64  # steps at most between two reads by the host
TIMED = 8  # replays of each graph whose parts are timed
aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.matmul, aten.linear, aten._scaled_mm}


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds of one step's parts on the device."""

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
    """Decode steps that were launched."""

    rows: Callable[[], list[list[StepRow]]]  # waits for the steps, and gives the rows of each
    parts: Callable[[], Shares | None]  # times of one step's parts; None: not timed
    weight_bytes: int = 0  # that one step reads; 0: not counted


class GraphRunner:
    """Launches decode steps of fixed shapes: the row count is padded to a power of two, lengths are bounded by another."""

    def __init__(self, step: DecodeStep, capture: bool) -> None:
        """capture: as one CUDA graph for each (rows, bound, depth, kind of logits processors). Otherwise the same steps run
        operation by operation, on any device."""
        self.step, self.capture = step, capture
        self.device = step.target.device
        self.max_new_positions = step.drafter.max_new_positions if step.drafter else 1
        self._graphs: dict[Hashable, _Graph] = {}
        self._pool: Any = None
        self.made = Captures()

    def launch(self, slots: Sequence[int], longest: int, limit: int | None, steps: int) -> Launched:
        """longest: no row is longer after these steps, drafts included."""
        rows = min(1 << (len(slots) - 1).bit_length(), self.step.kv.slots)
        filled = [*slots, *[self.step.kv.padding_slot] * (rows - len(slots))]
        self._bind(longest)
        if self.capture and (graph := self._graph(rows, limit)) is not None:
            return graph.launch(filled, steps, len(slots))
        slot_B = torch.tensor(filled, device=self.device)
        records = [self.step.run(slot_B, limit) for _ in range(steps)]
        return Launched(lambda: [StepRow.of(record_BX[: len(slots)].tolist()) for record_BX in records], lambda: None)

    def _bind(self, longest: int) -> None:
        state = self.step.state
        bind((self.step.kv, *(state.caches if state is not None else [])), longest, self.max_new_positions)

    def _graph(self, rows: int, limit: int | None) -> _Graph | None:
        """None: no graph can hold these steps, and no other is tried."""
        key = (rows, self.step.kv.static_length, limit, self.step.logits_processors.kind, self.step.slots.stop.most)
        graph = self._graphs.pop(key, None)
        if graph is None:
            while len(self._graphs) >= GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            self._pool = self._pool or cuda.graph_pool_handle()
            start_time, reserved_before = perf_counter(), cuda.memory_reserved(self.device)
            try:
                graph = _Graph(self.step, rows, limit, self.device, self._pool)
            except CaptureError as error:
                self.capture, self.refused = False, str(error)
                warnings.warn(f"decode steps run without CUDA graphs: {error}", stacklevel=2)
                return None
            capture_seconds, graph_bytes = perf_counter() - start_time, cuda.memory_reserved(self.device) - reserved_before
            self.made = Captures(self.made.count + 1, self.made.seconds + capture_seconds, self.made.bytes + graph_bytes)
        self._graphs[key] = graph  # the latest last
        return graph


class _Graph:
    """One decode step of one shape, captured. Each replay appends its record to a ring on the device."""

    def __init__(self, step: DecodeStep, rows: int, limit: int | None, device: torch.device, pool: Any) -> None:
        self.slot_B = torch.full((rows,), step.kv.padding_slot, device=device)
        self.device = device
        self._slots: list[int] = []
        self._events = [cuda.Event(enable_timing=True, external=True) for _ in range(4)]
        self._timed: list[Shares] = []

        def counted() -> tuple[Tensor, WeightReads]:
            with WeightReads() as reads:
                return step.run(self.slot_B, limit), reads  # on the padding slot

        record_BX, reads = warmed(counted, device)
        self._weight_bytes = reads.bytes(cuda.get_device_properties(device).L2_cache_size)
        self._ring = record_BX.new_zeros(RING, *record_BX.shape)
        self._next_1 = torch.zeros(1, dtype=torch.long, device=device)

        def replayed() -> None:
            self._ring.index_copy_(0, self._next_1, step.run(self.slot_B, limit)[None])
            self._next_1.add_(1)

        with step.marked(self._events):
            self.graph = captured_graph(replayed, device, pool)

    def launch(self, slots: list[int], steps: int, rows: int) -> Launched:
        if slots != self._slots:
            self.slot_B.copy_(pinned(torch.tensor(slots)), non_blocking=True)
            self._slots = slots
        self._next_1.zero_()
        for _ in range(steps):
            self.graph.replay()
        host_records = pinned(torch.empty(steps, *self._ring.shape[1:], dtype=torch.long))
        host_records.copy_(self._ring[:steps], non_blocking=True)
        copied_event = cuda.Event()
        copied_event.record()
        if len(self._timed) < TIMED:  # the next replay would overwrite the events
            self._time()

        def wait() -> list[list[StepRow]]:
            copied_event.synchronize()
            return [StepRow.of(step[:rows]) for step in host_records.tolist()]

        return Launched(wait, self._mean, self._weight_bytes)

    def _time(self) -> None:
        cuda.synchronize(self.device)
        stage_seconds = [a.elapsed_time(b) / 1000 for a, b in zip(self._events, self._events[1:], strict=False)]
        self._timed.append(Shares(*stage_seconds))

    def _mean(self) -> Shares:
        timings = self._timed[1:] or self._timed
        return Shares(*(sum(getattr(s, name) for s in timings) / len(timings) for name in ("draft", "verify", "commit")))


def capturable(target: Target, drafter: Drafter | None) -> bool:
    """Whether decode steps of this pair run as CUDA graphs."""
    return target.device.type == "cuda" and target.captured and (drafter is None or drafter.captured)


def bind(caches: Iterable[KVCache], longest: int, widest: int) -> None:
    """Fix the caches' shapes. No row exceeds `longest`, no pass has over `widest` positions. Similar lengths share a shape."""
    length = max(LEAST_BOUND, 1 << (longest - 1).bit_length())
    for kv in caches:
        kv.use_static_length(length, widest)


def pinned(x: Tensor) -> Tensor:
    """A copy in pinned host memory, for asynchronous copies."""
    return x.pin_memory()


class WeightReads(TorchDispatchMode):
    """Counts what matrix products read of tensors that were there before: the weights, in their stored size.

    A weight counts once for each product, as the head of a drafter that drafts token by token does. An embedding table counts
    only as an output matrix, and an expert only where it is chosen. Work within this context runs as it does outside.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()  # storages of results: no weights
        self._reads: list[tuple[int, int]] = []  # (address, bytes) of each weight, product by product

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.overloadpacket in PRODUCTS:
            self._reads += [(x.data_ptr(), x.numel() * x.element_size()) for x in inputs if _storage(x) not in self._made]
        input_storages = {_storage(x) for x in inputs}  # a view's storage may be a weight's
        self._made |= {_storage(x) for x in tree_leaves(out) if isinstance(x, Tensor)} - input_storages
        return out

    def bytes(self, cached: int = 0) -> int:
        """Bytes read in all. cached: bytes that stay on the chip between two reads; weights that fit there are read once."""
        times = Counter(self._reads)
        repeated_bytes = sum(size for (_, size), count in times.items() if count > 1)
        return sum(size if repeated_bytes <= cached else size * count for (_, size), count in times.items())


def _storage(x: Tensor) -> int:
    return id(x) if x.is_mkldnn else x.untyped_storage().data_ptr()
