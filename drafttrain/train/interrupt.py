"""Handles SIGTERM, SIGUSR1 and Ctrl-C: a training step is finished and saved first, all else abandoned. Reports hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import Any, TextIO

from drafttrain.core.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAVING = b"\ndrafttrain: Ctrl-C: finishing and saving this step first; press Ctrl-C again to end at once\n"
RESEND_AFTER = 0.5  # seconds


class Interrupt:
    """While this context is open, a signal raises `Interrupted`. Inside `deferred` it only sets `requested`; the loop reads it.

    A second Ctrl-C raises KeyboardInterrupt, even inside `deferred`. An ignored Ctrl-C stays ignored: worker processes leave it
    to their launcher.
    A signal may arrive in a finaliser, and Python drops exceptions raised there. The signal is then sent again.
    Any other exception after a signal leaves as `Interrupted` too: other processes received the signal first and are gone.
    """

    def __init__(self) -> None:
        self.requested = False
        self._ctrl_c_seen = False
        self._resend_timer: threading.Timer | None = None
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}
        self._unraisable = sys.unraisablehook

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python runs handlers nowhere else
            handled = [n for n in SIGNALS if n != signal.SIGINT or signal.getsignal(n) is signal.default_int_handler]
            self._before = {signum: signal.signal(signum, self._handle) for signum in handled}
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._resend_timer is not None:
            self._resend_timer.cancel()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._before:
            sys.unraisablehook = self._unraisable
        if self.requested and isinstance(error, Exception):
            raise Interrupted("while it was starting") from error

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals inside only set `requested`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def check(self) -> None:
        """Raise Interrupted if a deferred signal has not been acted on."""
        if self.requested:
            raise Interrupted("when training had ended")

    def _on_unraisable(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._resend_later(signal.SIGINT)
        elif not isinstance(unraisable.exc_value, Interrupted):
            self._unraisable(unraisable)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        if signum == signal.SIGINT:
            if self._ctrl_c_seen:
                raise KeyboardInterrupt
            if self._deferred and not self._ctrl_c_seen:
                os.write(2, SAVING)  # not print: the signal may have interrupted a print
            self._ctrl_c_seen = True
        if self._deferred or is_interruption(sys.exception()):
            return
        self._resend_later(signal.SIGTERM if signum == signal.SIGINT else signum)  # a second SIGINT would be a second Ctrl-C
        raise Interrupted(f"by {signal.Signals(signum).name}")

    def _resend_later(self, signum: int) -> None:
        """Send this process the signal again after `RESEND_AFTER`."""
        if self._resend_timer is not None:
            self._resend_timer.cancel()
        self._resend_timer = threading.Timer(RESEND_AFTER, signal.pthread_kill, (threading.main_thread().ident, signum))
        self._resend_timer.daemon = True
        self._resend_timer.start()


def is_interruption(error: BaseException | None) -> bool:
    """Whether the exception is an `Interrupted`, or was raised while one was handled."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


ACCURACY = 0.05  # of the timeout: least time between restarts of the timers, which are not restarted at every step
WRITING = 1.0  # seconds that the stacks may take


class Watchdog:
    """Writes all threads' stacks to `<folder>/rank-<N>.stack` whenever `alive` was not called for `seconds`.

    A C thread (faulthandler) writes them, so it works in a hanging interpreter. seconds: 0: off. ends: also end the process,
    with code 1. In a run of several processes it waits for one that is lost, and would wait forever.
    """

    def __init__(self, folder: Path, rank: int, seconds: float, say: Callable[[str], None], ends: bool = False) -> None:
        self.file, self.seconds, self.say, self.ends = folder / f"rank-{rank}.stack", seconds, say, ends
        self._opened: TextIO | None = None
        self._timer: threading.Timer | None = None
        self._armed = -inf

    def __enter__(self) -> Watchdog:
        if self.seconds > 0:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._opened = self.file.open("w", encoding="utf-8")
            self.alive()
        return self

    def alive(self) -> None:
        """A step has ended: restart the timers."""
        now = monotonic()
        if self._opened is None or now - self._armed < ACCURACY * self.seconds:
            return
        self._armed = now
        faulthandler.dump_traceback_later(self.seconds, repeat=True, file=self._opened)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self.seconds, self._report)
        self._timer.daemon = True
        self._timer.start()

    def _report(self) -> None:
        stacks = self.file.parent / "rank-*.stack"
        message = f"no step has ended for {self.seconds:g} seconds; every process's stacks are in {stacks}"
        if not self.ends:
            self.say(message)
            return
        reason = "a process or machine of the run may be lost, so this process ends"
        print(f"drafttrain: {message}; {reason}; resume=auto continues from the last checkpoint", file=sys.stderr, flush=True)
        sleep(WRITING)
        os._exit(1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._opened is None:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
        self._opened.close()
        if not self.file.stat().st_size:
            self.file.unlink()
            with suppress(OSError):  # the folder has another process's file
                self.file.parent.rmdir()
