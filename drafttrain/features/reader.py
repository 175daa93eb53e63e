"""Reads the next batch in a thread while the current one trains, into pinned host memory for a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Input = TypeVar("Input")
Output = TypeVar("Output")

BUFFERS = 2  # one is filled while the other is copied


class ReadAhead(Generic[Input, Output]):
    """`compute`, one call ahead, in a thread that the first `start` opens and `close` ends.

    `compute` never runs twice at a time. device: the device that the thread works for.
    """

    def __init__(self, compute: Callable[[Input], Output], device: torch.device) -> None:
        self._compute, self._device = compute, device
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[Input, Future[Output]] | None = None

    def start(self, batch: Input) -> None:
        """Start to compute the next batch. An earlier one that was not fetched is dropped."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "features", self._enter)
        if self._next is not None:
            self._next[1].cancel()
        self._next = batch, self._thread.submit(self._compute, batch)

    def get(self, batch: Input) -> Output:
        """The result that was started for this batch object, else a new one. Raises what `compute` raises for it."""
        if self._next is not None and self._next[0] is batch:
            (_, future), self._next = self._next, None
            return future.result()
        return self._compute(batch) if self._thread is None else self._thread.submit(self._compute, batch).result()

    def close(self) -> None:
        """Wait for a running call, drop its result and end the thread. `start` opens a new one."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _enter(self) -> None:
        if self._device.type == "cuda":  # otherwise the thread's first CUDA call opens a context on GPU 0
            torch.cuda.set_device(self._device)


class HostBuffers:
    """Pinned memory for copies to a GPU, reused after a copy has finished. One thread takes buffers, one gives them back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_use: deque[tuple[Tensor, Any]] = deque()

    def take(self, size: int) -> Tensor:
        """At least `size` bytes that no copy reads. Once `BUFFERS` are in use, waits for the oldest copy."""
        if len(self._in_use) >= BUFFERS:
            buffer, copied = self._in_use.popleft()
            copied.synchronize()
            if len(buffer) >= size:
                return buffer
        return self._allocated(size)

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back whose copies were enqueued on the device's current stream."""
        self._in_use.append((buffer, self._copy_event()))

    def _allocated(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _copy_event(self) -> Any:
        """An event that follows all work enqueued on the device's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
