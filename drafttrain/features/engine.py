"""The target's states from serving engines: requested some batches ahead, received in memory, never stored.

Shapes: B rows, T positions of a row, K keys, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from drafttrain.features.answers import Writing
from drafttrain.features.cached import Document, documents
from drafttrain.features.servers import ClosedError, ReceivedCounts, Servers, ServerSettings
from drafttrain.model.batch import TrainBatch, moved
from drafttrain.model.target import FINAL, Taps, Target

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Which states an engine must give.

    `final`: the engine gives the state after the last norm. Otherwise it gives the last block's output, and its norm is
    computed here.
    """

    taps: Taps
    blocks: int  # of the target
    final: bool = False

    @property
    def keys(self) -> tuple[int, ...]:
        """Blocks in ascending order, each once, then the final state: the order in which engines give them."""
        if self.final:
            return (*sorted({*self.taps.blocks}), FINAL)
        return tuple(sorted({*self.taps.blocks, self.blocks - 1}))

    @property
    def ids(self) -> tuple[int, ...]:
        """The layer ids of these blocks: id i is the residual stream before block i, so that b + 1 is the output of block b."""
        return tuple(key + 1 for key in self.keys if key != FINAL)

    def states(self, hidden_BTKH: Tensor, target: Target) -> dict[int, Tensor]:
        """The states [B, T, H] by tap key, the final one included, in the target's dtype."""
        states = {key: hidden_BTKH[..., i, :].to(target.dtype).contiguous() for i, key in enumerate(self.keys)}
        final_BTH = states[FINAL] if self.final else target.norm(states[self.blocks - 1])
        return {block: states[block] for block in self.taps.blocks} | {FINAL: final_BTH}


@dataclass
class _Receiving:
    """A batch whose states are received."""

    batch: TrainBatch  # keeps the object, by whose identity it is found
    hidden_BTKH: Tensor | None  # in host memory, pinned for a GPU; made when the first states come, in the server's dtype
    making: Lock
    parts: list[Future[None]]


class JoinedServers:
    """Asks both groups for every sequence. The keys of the second follow those of the first."""

    def __init__(self, first: Servers, second: Servers) -> None:
        self.groups = (first, second)

    @property
    def settings(self) -> ServerSettings:
        return self.groups[0].settings

    @property
    def names(self) -> list[str]:
        """Engines and their versions."""
        return sorted({name for group in self.groups for name in group.names})

    @property
    def number(self) -> int:
        """Of servers."""
        return sum(group.number for group in self.groups)

    @property
    def dtypes(self) -> list[str]:
        """Of the states that servers have given; one for each server that has answered."""
        return [dtype for group in self.groups for dtype in group.dtypes]

    @property
    def counts(self) -> ReceivedCounts:
        """A sequence counts once; every repeated request counts."""
        return replace(self.groups[0].counts, repeated=sum(group.counts.repeated for group in self.groups))

    def reset_counts(self) -> None:
        """Count from 0 again."""
        for group in self.groups:
            group.reset_counts()

    def states(self, ids: Sequence[int]) -> Tensor:
        """[T, K, H] the states of a sequence. Raises as `Servers.states`."""
        return torch.cat([group.states(ids) for group in self.groups], 1)

    def check(self) -> None:
        """Compare every server's states with the trainer's own."""
        for group in self.groups:
            group.check()

    def stop(self) -> None:
        """End the waits."""
        for group in self.groups:
            group.stop()

    def close(self) -> None:
        """End the waits, and remove the states of requests that nothing waits for."""
        for group in self.groups:
            group.close()


class EngineStates:
    """Adds the states that servers compute to batches. One request for each conversation of a batch.

    `begin` requests a batch's states. At most `ahead` batches are begun before they are filled, so the number of requests, the
    files and the memory are bounded. The states are the same with and without `begin`.
    """

    def __init__(
        self, servers: Servers | JoinedServers, layers: StateLayers, target: Target, ahead: int, writing: Writing | None = None
    ) -> None:
        """writing: how the target answers the training conversations' prompts; None: it reads the given answers."""
        self.servers, self.layers, self.target, self.ahead, self.writing = servers, layers, target, ahead, writing
        self._threads = ThreadPoolExecutor(servers.settings.concurrency, "states")
        self._begun: dict[int, _Receiving] = {}
        self._open: set[Future[Any]] = set()  # requests that are not answered
        self._seen = ReceivedCounts()  # when figures were last taken
        self._waited = 0.0  # seconds since then
        self.tokens, self.answer_tokens, self.seconds, self.waited = 0, 0, 0.0, 0.0  # of all steps

    def begin(self, batch: TrainBatch) -> None:
        """Request the states of a batch that will be filled soon, unless they have been. Errors are raised by `fill`."""
        if id(batch) in self._begun:
            return
        receiving = _Receiving(batch, None, Lock(), [])
        self._begun[id(batch)] = receiving
        for document in documents(batch.to(torch.device("cpu"))):
            receiving.parts.append(self.submit(self._receive, receiving, document))

    def forget(self, batch: TrainBatch) -> None:
        """Drop a batch that was begun and will not be filled."""
        self._begun.pop(id(batch), None)

    @torch.no_grad()
    def fill(self, batch: TrainBatch) -> TrainBatch:
        """The batch on the target's device with the states that `Online.fill` would compute. Padding holds the states of zeros.

        Raises UserError where no server gives the states.
        """
        self.begin(batch)
        receiving = self._begun.pop(id(batch))
        self.results(receiving.parts)
        hidden_BTKH = receiving.hidden_BTKH
        if hidden_BTKH is None:  # a batch of padding alone
            hidden_BTKH = torch.zeros(*batch.token_BT.shape, len(self.layers.keys), self.target.shape.hidden_size)
        hidden_BTKH = moved(hidden_BTKH, self.target.device)
        return replace(batch.to(self.target.device), hidden=self.layers.states(hidden_BTKH, self.target))

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start a request in a thread of its own."""
        future = self._threads.submit(work, *args, **kwargs)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def results(self, parts: Sequence[Future[R]]) -> list[R]:
        """Wait for requests. Raises UserError where no server answers one."""
        start_time = perf_counter()
        results = [future.result() for future in parts]
        self._waited += perf_counter() - start_time
        return results

    def hold(self, batch: TrainBatch, states: Sequence[Tensor]) -> None:
        """Keep states that have come for `fill`: [T, K, H] of the first positions of each row."""
        receiving = self._begun[id(batch)] = _Receiving(batch, None, Lock(), [])
        for row, hidden_TKH in enumerate(states):
            self._place(receiving, row, 0, hidden_TKH)

    def close(self) -> None:
        """Drop what was begun, wait for running requests and remove their files. Nothing can be filled afterwards."""
        self.servers.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._begun.clear()
        self.servers.close()

    def figures(self, seconds: float) -> dict[str, Any]:
        """The figures of a step that took so many seconds, of this process."""
        counts, waited = replace(self.servers.counts), self._waited
        delta, self._seen, self._waited = counts.since(self._seen), counts, 0.0
        self.tokens, self.answer_tokens = self.tokens + delta.tokens, self.answer_tokens + delta.answer_tokens
        self.seconds, self.waited = self.seconds + seconds, self.waited + waited
        figures: dict[str, Any] = {
            "states_tokens_per_s": delta.tokens / seconds,
            "states_queue": len(self._open),
            "states_wait_share": min(waited / seconds, 1.0),
            "states_repeated": counts.repeated,
        }
        if self.writing is not None:
            figures |= {"answers_tokens_per_s": delta.answer_tokens / seconds} | delta.answer_figures()
        return figures

    def pause(self) -> None:
        """Leave out what was received and waited for since the last step: it was not training's."""
        self._seen, self._waited = replace(self.servers.counts), 0.0

    def totals(self) -> dict[str, Any]:
        """The figures of all steps since this process began, for the report."""
        counts = self.servers.counts
        figures = {
            "engine": " ".join(self.servers.names),
            "servers": self.servers.number,
            "layer_ids": list(self.layers.ids),
            "requests": counts.requests,
            "tokens": counts.tokens,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else None,
            "wait_share": self.waited / self.seconds if self.seconds else None,
            "repeated": counts.repeated,
        }
        if self.writing is None:
            return figures
        rate = self.answer_tokens / self.seconds if self.seconds else None
        figures |= {"answers": counts.answers, "answer_tokens": counts.answer_tokens, "answers_tokens_per_s": rate}
        return figures | counts.answer_figures() | {"temperature": self.writing.temperature}

    def _receive(self, receiving: _Receiving, document: Document) -> None:
        """Get one conversation's states into the batch's."""
        token_T = receiving.batch.token_BT[document.row, document.start : document.stop]
        ids = token_T.tolist()
        try:
            hidden_TKH = self.servers.states(ids)
        except ClosedError:
            return
        self._place(receiving, document.row, document.start, hidden_TKH)

    def _place(self, receiving: _Receiving, row: int, start: int, hidden_TKH: Tensor) -> None:
        """Copy a conversation's states into the batch's."""
        with receiving.making:
            if receiving.hidden_BTKH is None:
                pinned = self.target.device.type == "cuda"
                shape = (*receiving.batch.token_BT.shape, *hidden_TKH.shape[1:])
                receiving.hidden_BTKH = torch.zeros(shape, dtype=hidden_TKH.dtype, pin_memory=pinned)
        receiving.hidden_BTKH[row, start : start + len(hidden_TKH)] = hidden_TKH
