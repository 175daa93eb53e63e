"""SIGTERM, SIGUSR1 and the first Ctrl-C: a training step is finished and saved first, anything else is left where it is."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from drafttrain.core.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAVING = b"\ndrafttrain: Ctrl-C: this step is finished and saved first; once more ends at once\n"
REMINDER = 0.5  # seconds


class Interrupt:
    """While this context is open, a signal raises `Interrupted`; inside `held` it only sets `asked`, for the loop to look at.

    Python drops what is raised in a finaliser, where a signal may find it, so it is raised again until it is on its way out; so
    is the second Ctrl-C.
    What else fails once a signal was there fails because other processes heard it first, and leaves as `Interrupted` too.
    A second Ctrl-C raises KeyboardInterrupt, whatever is held. Where Ctrl-C is ignored it stays so: processes leave it to their
    launcher.
    """

    def __init__(self) -> None:
        self.asked = False
        self._keyed = False  # Ctrl-C was there
        self._reminder: threading.Timer | None = None
        self._held = False
        self._before: dict[signal.Signals, Any] = {}
        self._unraisable = sys.unraisablehook

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python runs handlers nowhere else
            heard = [n for n in SIGNALS if n != signal.SIGINT or signal.getsignal(n) is signal.default_int_handler]
            self._before = {number: signal.signal(number, self._hear) for number in heard}
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._drop
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._reminder is not None:
            self._reminder.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            sys.unraisablehook = self._unraisable
        if self.asked and isinstance(error, Exception):
            raise Interrupted("while it was starting") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def check(self) -> None:
        """Raise what a signal asked for when it was held and nothing has looked since."""
        if self.asked:
            raise Interrupted("when training had ended")

    def _drop(self, dropped: Any) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            self._remind(signal.SIGINT)
        elif not isinstance(dropped.exc_value, Interrupted):
            self._unraisable(dropped)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            if self._keyed:
                raise KeyboardInterrupt
            if self._held and not self._keyed:
                os.write(2, SAVING)  # not by print, which this may have interrupted
            self._keyed = True
        if self._held or _leaving(sys.exception()):
            return
        self._remind(signal.SIGTERM if number == signal.SIGINT else number)  # a second SIGINT would be a second Ctrl-C
        raise Interrupted(f"by {signal.Signals(number).name}")

    def _remind(self, number: int) -> None:
        """Send this process the signal again, a while later."""
        if self._reminder is not None:
            self._reminder.cancel()
        self._reminder = threading.Timer(REMINDER, signal.pthread_kill, (threading.main_thread().ident, number))
        self._reminder.daemon = True
        self._reminder.start()


def _leaving(error: BaseException | None) -> bool:
    """Whether what is handled right now is an interruption, or follows from one."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None
