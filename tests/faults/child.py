"""Work in a forked child, with bounds of time and memory: its output, how it ended, and the processes that it left.

A fresh Python needs seconds for its imports. So the campaign imports everything once and forks for each try.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import multiprocessing.util
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
MEMORY = 6 << 30  # bytes of address space in addition to the campaign's
LATE, STUCK = 90.0, 900.0  # seconds of processor time that a command may take, and of the clock: machines may be busy
GRACE = 60.0  # seconds for processes that a command has left to end: those that still import see it after that
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended."""

    code: int  # exit code; negative: the signal that ended it
    out: str
    err: str
    seconds: float
    late: bool = False  # the time limit ended it
    left: tuple[str, ...] = ()  # processes that it left running

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err + self.out

    @property
    def line(self) -> str | None:
        """The one line on stderr with which a command refuses its input; None for no line or several."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("drafttrain: ")]
        return said[0] if self.code in (2, 3, 4) and len(said) == 1 and lines[-1] == said[0] and not self.traceback else None


class Child:
    """A running child. steps: number of changes to the file system that it has begun."""

    def __init__(self, pid: int, out: Path, err: Path, steps: mmap.mmap | None = None) -> None:
        self.pid, self.out, self.err, self._steps = pid, out, err, steps
        self.began = time.monotonic()
        self._code: int | None = None

    @property
    def steps(self) -> int:
        return 0 if self._steps is None else int.from_bytes(self._steps[:8], "little")

    @property
    def ready(self) -> bool:
        """Whether it has begun its own work, after the campaign's part."""
        return self._steps is None or bool(self._steps[8]) or self.poll() is not None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def signal(self, number: int, group: bool = False) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.pid, number)

    def wait(self, seconds: float = LATE) -> Ended:
        """Wait until it has ended; kill it after this many seconds of processor time. Processes that it left get some seconds
        to end.
        """
        late = not self._ends(seconds)
        if late:
            self.signal(signal.SIGKILL, group=True)
            self._ends(60)
        left = self._left(GRACE)
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        out, err = (
            file.read_text(encoding="utf-8", errors="replace") if file.exists() else "" for file in (self.out, self.err)
        )
        code = self._code if self._code is not None else -signal.SIGKILL
        return Ended(code, out, err, time.monotonic() - self.began, late, tuple(name for _, name in left))

    def _ends(self, seconds: float) -> bool:
        limit = time.monotonic() + STUCK
        looked = time.monotonic()
        while self.poll() is None:
            time.sleep(0.003)
            if time.monotonic() - looked > 0.5:
                looked = time.monotonic()
                if looked > limit or self._spent() > seconds:
                    return False
        return True

    def _spent(self) -> float:
        """Seconds of processor time, with those of ended children."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def _left(self, seconds: float) -> list[tuple[int, str]]:
        limit, found = time.monotonic() + seconds, self._session()
        while found and time.monotonic() < limit:
            time.sleep(0.1)
            found = self._session()
        return found

    def _session(self) -> list[tuple[int, str]]:
        """Processes of its session, without zombies."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid and fields[0] != "Z" and int(entry.name) != self.pid:
                    found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")[:120]))
        return found


def forked(
    work: Callable[[], int], folder: Path, said: Path, die_at: tuple[int, int] | None = None, memory: int = MEMORY
) -> Child:
    """Do the work in a child with this working directory.

    said: the folder for its output. die_at: (n, signal): it sends itself the signal before its n-th change to a file under
    `folder`, counted from 1.
    """
    said.mkdir(parents=True, exist_ok=True)
    child_out, child_err = said / "stdout", said / "stderr"
    steps = mmap.mmap(-1, 16)
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a child that is not ready would end in the campaign's code
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    if not pid:
        _become(work, folder, (child_out, child_err), memory, steps, die_at)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Child(pid, child_out, child_err, steps)


def fresh(arguments: Sequence[str], folder: Path, said: Path) -> Child:
    """`drafttrain ARGUMENTS` in a new Python, for commands that start processes of several ranks."""
    said.mkdir(parents=True, exist_ok=True)
    child_out, child_err = said / "stdout", said / "stderr"
    with child_out.open("wb") as out, child_err.open("wb") as err:
        started = subprocess.Popen(
            [sys.executable, "-m", "drafttrain", *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    child = Child(started.pid, child_out, child_err)
    started.returncode = 0  # `Child` waits for it
    return child


def _become(
    work: Callable[[], int],
    folder: Path,
    said: tuple[Path, Path],
    memory: int,
    steps: mmap.mmap,
    die_at: tuple[int, int] | None,
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _redirect(said)
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _count_changes(folder, steps, die_at)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        forget_exit_functions()
        steps[8] = 1
        code = work()
    except KeyboardInterrupt:  # outside the command's own code: end as Python does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the command has ended
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def forget_exit_functions() -> None:
    """Leave what the parent process registered for its end to the parent: a child would delete its temporary folders."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # its entries know their process


def _redirect(said: tuple[Path, Path]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, file in enumerate(said, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
    sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8", closefd=False), os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _count_changes(folder: Path, steps: mmap.mmap, die_at: tuple[int, int] | None) -> None:
    """Count changes to files under the folder, by the interpreter's audit events, and die at the right one."""
    root, pid, count = str(folder.resolve()), os.getpid(), 0

    def changes(event: str, args: tuple[object, ...]) -> bool:
        if event == "open":
            if not (isinstance(args[2], int) and args[2] & WRITES):
                return False
        elif event not in CHANGES:
            return False
        path = args[0]
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        return isinstance(path, str) and (path.startswith(root) or not path.startswith("/"))

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if (event == "open" or event in CHANGES) and os.getpid() == pid and changes(event, args):
            count += 1
            steps[:8] = count.to_bytes(8, "little")
            if die_at is not None and count == die_at[0]:
                os.kill(pid, die_at[1])

    sys.addaudithook(hook)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Children share the memory of all objects that exist now."""
    import gc

    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
