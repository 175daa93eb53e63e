"""Writes the stacks of every process to files when no step ends for a long time, and ends a run of several processes."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import TextIO

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
