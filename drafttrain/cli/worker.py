"""The wrapper of a command in each process of a launch. It leaves files with results for the launching process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from drafttrain.cli.quiet import quiet
from drafttrain.core.errors import Interrupted, UserError, one_line
from drafttrain.runs.options import RunOptions
from drafttrain.train.interrupt import is_interruption

SIGNALLED = "signalled"  # file: a signal has reached the launching process, and all its processes end
INTERRUPTIONS = "interrupted-*"  # files: the message of a process that a signal has ended, named by start and rank
NOTES = "mistake-*"  # files: the message of a UserError
STARTED = "started-*"  # files: the machines have met, and a process has started; named by process id and rank
ENDED = "ended-*"  # files: the process has ended without a failure; named by process id
MADE = "made"  # file: the path that the command has returned on rank 0
DYING = 1.0  # seconds that the threads of a killed process may take to end
NCCL_SIGNS = ("ncclRemoteError", "remote process exited")
LOST = (
    "drafttrain: rank {rank} has lost the connection to another process of the run ({reason}); the output of the other ranks "
    "and machines says why; resume=auto continues from the last checkpoint"
)


def log_of(folder: Path, rank: int) -> Path:
    """The log file of a process."""
    return folder / f"rank-{rank}.log"


def work_in_process(
    work: Callable[[RunOptions, dict[str, Any]], object], options: RunOptions, resolved: dict[str, Any], folder: Path
) -> None:
    """Run the command. Rank 0 prints to the console; other ranks write to log files in `folder`. Tracebacks go there too.

    A process that is restarted after a failure resumes the run, but not after a user's mistake or a signal to the launching
    process. If that process dies, this one ends as at SIGTERM.
    """
    rank, launcher = int(os.environ["RANK"]), end_with_parent()
    (folder / STARTED.replace("*", f"{os.getpid()}-{rank}")).touch()
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end_at_first_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the launcher handles it
    if (folder / SIGNALLED).exists():
        outlive_signals(launcher, folder)
        return
    for earlier in folder.glob(INTERRUPTIONS):  # a process that fails has the others ended by a signal before all restart
        if not earlier.match(INTERRUPTIONS.replace("*", f"{start}-*")):
            earlier.unlink(missing_ok=True)
    if any(folder.glob(NOTES)):
        raise SystemExit(2)
    quiet()
    if rank > 0:
        _redirect(log_of(folder, rank))
    if int(start) and options.resume is None:
        options = replace(options, resume="auto")
    made: object = None  # where it is interrupted together with all others
    try:
        made = work(options, resolved)
    except Interrupted as interrupted:
        if orphaned(launcher, folder):
            leave_orphaned(rank, interrupted)
        (folder / INTERRUPTIONS.replace("*", f"{start}-{rank:05}")).write_text(str(interrupted), encoding="utf-8")
        if not interrupted.together:  # other processes may wait for this one; its exit code ends them
            raise SystemExit(Interrupted.CODE) from interrupted
    except UserError as error:
        (folder / NOTES.replace("*", f"{rank:05}")).write_text(str(error), encoding="utf-8")
        raise SystemExit(2) from error
    except Exception as error:
        reason = lost_connection(error)
        with log_of(folder, rank).open("a", encoding="utf-8") as log:
            if reason is None:
                traceback.print_exc(file=log)
            else:
                print(LOST.format(rank=rank, reason=reason), file=log)
        if reason is not None:
            raise SystemExit(1) from error
        raise
    if rank == 0 and isinstance(made, Path):
        (folder / MADE).write_text(str(made), encoding="utf-8")
    outlive_signals(launcher, folder)
    (folder / ENDED.replace("*", str(os.getpid()))).touch()


def lost_connection(error: BaseException | None) -> str | None:
    """The reason if the connection to another process of the run is lost, which is not this process's fault. Otherwise None.

    gloo and NCCL have no exception of their own for it.
    """
    from torch.distributed import DistNetworkError, DistStoreError

    while error is not None:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, RuntimeError) and "gloo/transport" in first:
            return one_line(first.rpartition("] ")[2])
        if isinstance(error, (DistNetworkError, DistStoreError)):
            return one_line(first)
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in NCCL_SIGNS):
            return one_line(first)
        error = error.__cause__ or error.__context__
    return None


def end_with_parent() -> int:
    """On Linux, have SIGTERM sent to this process when its parent dies. Returns the parent's process id."""
    starter = multiprocessing.parent_process()
    parent = os.getppid() if starter is None or starter.pid is None else starter.pid
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has died already, as in the seconds of this process's imports
            os.kill(os.getpid(), signal.SIGTERM)
    return parent


def orphaned(launcher: int, folder: Path) -> bool:
    """Whether the launching process has died. Its threads end one after the other, each with a signal to this process."""
    deadline = time.monotonic() + DYING
    while os.getppid() == launcher and not (folder / SIGNALLED).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return os.getppid() != launcher


def end_at_first_signal(number: int, frame: FrameType | None) -> None:
    """End by the signal, unless an earlier one is being acted on: its message would be lost."""
    if not is_interruption(sys.exception()):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def outlive_signals(launcher: int, folder: Path) -> None:
    """From now on, signals to the launching process and its children do not end this process, whose work is done.

    It waits for torch's launcher to read its result. If a signal ends it there, the launcher may wait for it without end
    (`multiprocessing.Event.set`), and so do those of the other machines. SIGTERM still ends it if the launcher has died, or if
    torch sends it because another process has failed.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if orphaned(launcher, folder) or not (folder / SIGNALLED).exists():
            end_at_first_signal(number, frame)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leave_orphaned(rank: int, interrupted: Interrupted) -> NoReturn:
    """End this process now. Its group communicates through the launcher, which has died."""
    if rank == 0:
        print(f"drafttrain: the launcher has died: interrupted {interrupted}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Interrupted.CODE)


def _redirect(file: Path) -> None:
    """Redirect the output of this process to a file, including that of C libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
