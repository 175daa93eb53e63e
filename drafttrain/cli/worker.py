"""What each process of a launch does around its command, and the notes it leaves to the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from drafttrain.cli.quiet import quiet
from drafttrain.core.errors import Interrupted, UserError
from drafttrain.runs.options import RunOptions

INTERRUPTED = "interrupted"  # the processes are to end, or have ended, because a signal asked for it: what they said of it
NOTES = "mistake-*"  # what the user has to mend, in a line


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def work_in_process(
    work: Callable[[RunOptions, dict[str, Any]], object], options: RunOptions, resolved: dict[str, Any], folder: Path
) -> None:
    """Rank 0 has the console; the others' output goes to files in `folder`, as does the traceback of any of them.

    A process that starts again because one had failed goes on with the run; not after a mistake or an interruption. Where the
    one that started it dies, it ends as at SIGTERM.
    """
    rank, launcher = int(os.environ["RANK"]), end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the launcher says what it means
    if (folder / INTERRUPTED).exists():
        return
    if any(folder.glob(NOTES)):
        raise SystemExit(2)
    quiet()
    if rank > 0:
        _redirect(log_of(folder, rank))
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and options.resume is None:
        options = replace(options, resume="auto")
    try:
        work(options, resolved)
    except Interrupted as interrupted:
        if os.getppid() != launcher:
            leave_orphaned(rank, interrupted)
        (folder / INTERRUPTED).write_text(str(interrupted), encoding="utf-8")
        if not interrupted.together:  # others may wait for this one: its end ends them
            raise SystemExit(Interrupted.CODE) from interrupted
    except UserError as error:
        (folder / NOTES.replace("*", f"{rank:05}")).write_text(str(error), encoding="utf-8")
        raise SystemExit(2) from error
    except Exception:
        with log_of(folder, rank).open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        raise


def end_with_parent() -> int:
    """Have SIGTERM sent to this process when the one that started it dies, on Linux; the number of that process."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), signal.SIGTERM)
    return parent


def leave_orphaned(rank: int, interrupted: Interrupted) -> NoReturn:
    """End now: what the group's processes would say to each other goes through the launcher, which has died."""
    if rank == 0:
        print(f"drafttrain: the launcher has died: interrupted {interrupted}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Interrupted.CODE)


def _redirect(file: Path) -> None:
    """Output of this process, that of libraries below Python too."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
