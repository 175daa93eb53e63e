"""When no step ends for long: the stacks of every process, in files."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TextIO

ACCURACY = 0.05  # of the timeout: clocks are started anew that often, not after every step


class Watchdog:
    """Writes all threads' stacks to `<folder>/rank-<N>.stack` when `alive` is not called for `seconds`, and again after as many
    more. A thread of C code writes them, which needs nothing of a hanging interpreter. seconds 0: off.
    """

    def __init__(self, folder: Path, rank: int, seconds: float, say: Callable[[str], None]) -> None:
        self.file, self.seconds, self.say = folder / f"rank-{rank}.stack", seconds, say
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
        """A step has ended; the time starts again."""
        now = monotonic()
        if self._opened is None or now - self._armed < ACCURACY * self.seconds:
            return
        self._armed = now
        faulthandler.dump_traceback_later(self.seconds, repeat=True, file=self._opened)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self.seconds, self._tell)
        self._timer.daemon = True
        self._timer.start()

    def _tell(self) -> None:
        stacks = self.file.parent / "rank-*.stack"
        self.say(f"no step has ended for {self.seconds:g} seconds; every process's stacks are in {stacks}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._opened is None:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
        self._opened.close()
        if not self.file.stat().st_size:
            self.file.unlink()
            with suppress(OSError):  # another process's is there
                self.file.parent.rmdir()
