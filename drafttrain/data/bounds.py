"""Time and memory limits for code that comes with a target or its data: chat templates are programs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

SECONDS = 20.0  # of processor time
SIZE = 1 << 30  # bytes in addition to what the process uses already

STATM = Path("/proc/self/statm")


class TooLongError(BaseException):
    """The time is used up. Not an Exception, because the bounded program may catch those, as Jinja's optimiser does."""


@contextmanager
def bounded(seconds: float | None = None, size: int | None = None) -> Iterator[None]:
    """End the code inside with TooLongError or MemoryError when it exceeds these limits; None: `SECONDS` and `SIZE`.

    Time is limited only in a process's main thread, memory only on Linux.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "ITIMER_VIRTUAL"):
            stack.enter_context(_time(SECONDS if seconds is None else seconds))
        if STATM.is_file():
            stack.enter_context(_memory(SIZE if size is None else size))
        yield


@contextmanager
def _time(seconds: float) -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise TooLongError(f"it takes more than {seconds:g} seconds")

    previous_handler = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)  # repeated, in case the error is caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous_handler)


@contextmanager
def _memory(size: int) -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    requested_limit = int(STATM.read_text().split()[0]) * resource.getpagesize() + size
    soft_limit = requested_limit if soft == resource.RLIM_INFINITY else min(requested_limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
