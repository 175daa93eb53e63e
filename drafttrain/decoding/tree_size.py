"""How many nodes a static tree should have on this machine.

Shapes: N nodes (root included), K draft depth.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor, cuda

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import expected_nodes, tuned_paths
from drafttrain.decoding.graph_runner import LEAST_BOUND, WARM_RUNS, CaptureError, bind, capturable, captured_graph, warmed
from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import Target

CANDIDATES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # drafts, the root not counted
LARGE = (96, 128, 192, 255)  # tried only where the largest of the others is the best of them: they take long on a slow machine
CONTEXT = 128  # committed positions at which costs are taken
WARM = 2 + WARM_RUNS  # proposals besides those that count: the first one, and those before a capture
Key = TypeVar("Key", bound=Hashable)


def best_nodes(target: Target, drafter: Drafter, sequences: Sequence[Tensor], candidates: Sequence[int] = CANDIDATES) -> int:
    """The node count with most tokens per second at batch size 1: expected tokens of a step / (proposal + verification).

    sequences: as for `Proposal.tune`. candidates: ascending; after `CANDIDATES`, `LARGE` may follow. Both costs are measured as
    steps will run on this machine, captured or call by call; the choice holds only for this machine and dtype.
    """
    draft, best, fastest = proposal_seconds(target, drafter), candidates[0], 0.0
    for sizes in (candidates, LARGE) if candidates is CANDIDATES else (candidates,):
        paths = {nodes: tuned_paths(sequences, nodes) for nodes in sizes}
        verify = verification_seconds(target, drafter, [n + 1 for n in sizes])
        for nodes in (n for n, tree_paths in paths.items() if tree_paths):
            rate = (1.0 + expected_nodes(sequences, paths[nodes])) / (draft + verify[nodes + 1])
            best, fastest = (nodes, rate) if rate > fastest else (best, fastest)
        if best != sizes[-1]:
            break
    return best


@torch.inference_mode()
def verification_seconds(
    target: Target, drafter: Drafter, sizes: Sequence[int], repeats: int = 15, batch: int = 1
) -> dict[int, float]:
    """Median seconds of the target's pass over `batch` rows by node count, all sizes in turn.

    Where decode steps are captured as CUDA graphs, so are these passes.
    """
    device, captured = target.device, capturable(target, drafter)
    return median_seconds(_passes(target, drafter, sizes, batch, captured), device, captured, repeats)


def _passes(target: Target, drafter: Drafter, sizes: Sequence[int], batch: int, captured: bool) -> dict[int, Work]:
    """The target's pass over so many nodes, after `CONTEXT` positions, by their number."""
    device = target.device
    kv = target.new_cache(batch, (LEAST_BOUND if captured else CONTEXT) + max(sizes))
    position_BT = torch.arange(CONTEXT, device=device).expand(batch, -1)
    target(torch.ones_like(position_BT), kv, None, position_BT, drafter.taps, position_BT[:, :0])
    kv.keep(position_BT, torch.full((batch,), CONTEXT, device=device))
    if captured:
        bind([kv], CONTEXT, max(sizes))
    return {size: Work(partial(_verify, target, drafter, kv, *_chain(size, batch, device))) for size in sizes}


def _chain(size: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ancestor_BNN, position_BN) of a chain of so many nodes after the context. The tree's shape does not change the cost."""
    ancestor_NN = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return ancestor_NN.expand(batch, -1, -1), (CONTEXT + torch.arange(size, device=device)).expand(batch, -1)


def _verify(target: Target, drafter: Drafter, kv: KVCache, ancestor_BNN: Tensor, position_BN: Tensor) -> Tensor:
    logits_BNV = target(torch.ones_like(position_BN), kv, ancestor_BNN, position_BN, drafter.taps).logits_BRV
    assert logits_BNV is not None
    if not kv.croppable:  # a commit runs the scans of recurrent layers again
        kv.mark(torch.full_like(position_BN[:, 0], max(1, position_BN.shape[1] - 1)))
    return logits_BNV


@torch.inference_mode()
def proposal_seconds(target: Target, drafter: Drafter, repeats: int = 15, batch: int = 1, depth: int | None = None) -> float:
    """Median seconds of a proposal for `batch` rows, no deeper than `depth`; after each, one more token is observed.

    Where decode steps are captured as CUDA graphs, so is this one, and observing is a part of it. Elsewhere the target's pass
    follows, as in decoding: on a CPU it drives the drafter's weights and code out of the caches.
    """
    device, captured = target.device, capturable(target, drafter)
    positions = CONTEXT + repeats + WARM
    state = drafter.open(batch, max(positions, LEAST_BOUND if captured else 0) + drafter.max_new_positions)
    caches, slot_B = state.caches, torch.arange(batch, device=device)
    if captured:
        for kv in caches:
            kv.use_static_length(0)  # nothing is in the cache yet
    state.observe_prompt(_commit(target, drafter, batch, CONTEXT), slot_B)
    if captured:
        bind(caches, positions, drafter.max_new_positions)
    observed = _commit(target, drafter, batch, 1)
    verify = None if captured else _passes(target, drafter, [1], batch, captured)[1].run

    def after() -> None:
        state.observe(observed, slot_B)
        if verify is not None:
            verify()

    step = Work(lambda: state.propose(slot_B, Sampling(), depth).token_BN, after)
    return median_seconds({depth: step}, device, captured, repeats)[depth]


def _commit(target: Target, drafter: Drafter, batch: int, length: int) -> Commit:
    token_BA = torch.ones(batch, length, dtype=torch.long, device=target.device)
    hidden = {key: torch.zeros(batch, length, target.shape.hidden_size, device=target.device) for key in drafter.taps.keys}
    return Commit(token_BA, token_BA, hidden, torch.full((batch,), length, device=target.device))


@dataclass(frozen=True, slots=True)
class Work:
    """Something to time."""

    run: Callable[[], Tensor]  # is timed; gives any tensor that it made
    after: Callable[[], object] = lambda: None  # runs after each timing


def median_seconds(works: Mapping[Key, Work], device: torch.device, captured: bool, repeats: int) -> dict[Key, float]:
    """Median seconds of each work; all are timed in turn. captured: replays of CUDA graphs that hold `run` and `after`."""
    times: dict[Key, Callable[[], float]] = {key: partial(_call_seconds, work) for key, work in works.items()}
    if captured:
        pool = cuda.graph_pool_handle()
        with suppress(CaptureError):  # decode steps will run call by call too
            times = {key: _replay_timer(work, device, pool) for key, work in works.items()}
    durations: dict[Key, list[float]] = {key: [] for key in works}
    for _ in range(repeats + 1):  # the first time counts for nothing
        for key, seconds in times.items():
            durations[key].append(seconds())
    return {key: median(seconds_per_run[1:]) for key, seconds_per_run in durations.items()}


def _call_seconds(work: Work) -> float:
    start = perf_counter()
    work.run().flatten()[0].item()  # waits for the device
    elapsed = perf_counter() - start
    work.after()
    return elapsed


def _replay_timer(work: Work, device: torch.device, pool: object) -> Callable[[], float]:
    def whole() -> None:
        work.run()
        work.after()

    warmed(whole, device)
    graph = captured_graph(whole, device, pool)
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def seconds() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return seconds
