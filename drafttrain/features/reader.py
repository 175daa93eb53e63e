"""Reading the next batch while the current one trains: a thread of its own, and host memory that a GPU copies from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Given = TypeVar("Given")
Made = TypeVar("Made")

BUFFERS = 2  # one is filled while the other is copied


class ReadAhead(Generic[Given, Made]):
    """`make` with one call in advance, in a thread that the first `start` opens and `close` ends. `make` never runs twice at
    a time. device: what the thread works for.
    """

    def __init__(self, make: Callable[[Given], Made], device: torch.device) -> None:
        self._make, self._device = make, device
        self._thread: ThreadPoolExecutor | None = None
        self._begun: tuple[Given, Future[Made]] | None = None

    def start(self, given: Given) -> None:
        """Begin with what will be asked for next. What was begun before and not asked for is dropped."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "features", self._enter)
        if self._begun is not None:
            self._begun[1].cancel()
        self._begun = given, self._thread.submit(self._make, given)

    def get(self, given: Given) -> Made:
        """What was begun for this very object, else a new result; raises what `make` raises for it."""
        if self._begun is not None and self._begun[0] is given:
            (_, future), self._begun = self._begun, None
            return future.result()
        return self._make(given) if self._thread is None else self._thread.submit(self._make, given).result()

    def close(self) -> None:
        """Wait for a call that runs, drop its result, end the thread. `start` opens another one."""
        thread, self._thread, self._begun = self._thread, None, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _enter(self) -> None:
        if self._device.type == "cuda":  # else a thread's first call opens a context on another GPU
            torch.cuda.set_device(self._device)


class HostBuffers:
    """Pinned memory for copies to a GPU, used again when its copy is done. One thread takes, one gives back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._given: deque[tuple[Tensor, Any]] = deque()

    def take(self, size: int) -> Tensor:
        """[size or more] bytes that no copy reads; waits for the older copy once `BUFFERS` are in use."""
        if len(self._given) >= BUFFERS:
            buffer, copied = self._given.popleft()
            copied.synchronize()
            if len(buffer) >= size:
                return buffer
        return self._allocated(size)

    def give(self, buffer: Tensor) -> None:
        """Its copies have been started on the device's current stream."""
        self._given.append((buffer, self._recorded()))

    def _allocated(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _recorded(self) -> Any:
        """An event behind all that the device's current stream has been given."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
