"""Meeting the other machines of a run, and noticing that they are lost."""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drafttrain.cli.worker import ENDED, INTERRUPTIONS, NOTES, SIGNALLED, STARTED
from drafttrain.core.errors import UserError, WorkerError
from drafttrain.runs.options import LauncherOptions

JOINING = 600.0  # seconds that machines may start apart
CALL = 60.0  # seconds that the rendezvous may take to answer, at most
STUCK = 5.0  # seconds that torch may take to end after the last process


def wait_for_rendezvous(launcher: LauncherOptions) -> None:
    """Wait until the machine of the rendezvous answers, because it may start later. torch itself waits a minute.

    Raises RendezvousTimeoutError after `JOINING` seconds.
    """
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    if launcher.nodes == 1:
        return
    host, _, port = str(launcher.rendezvous).rpartition(":")
    deadline = time.monotonic() + JOINING
    while not is_here(host) and not answers(host, port):
        if time.monotonic() > deadline:
            raise RendezvousTimeoutError
        time.sleep(1.0)


def address_towards(launcher: LauncherOptions) -> str:
    """The address by which the machine of the rendezvous reaches this one: nothing is sent. Its name may be unknown at first.

    Raises UserError after `JOINING` seconds.
    """
    host, _, port = str(launcher.rendezvous).rpartition(":")
    deadline = time.monotonic() + JOINING
    while True:
        for family, *_, address in addresses(host, port):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as tried:
                tried.connect(address)
                return str(tried.getsockname()[0])
        if time.monotonic() > deadline:
            raise UserError(f"launcher.rendezvous is {launcher.rendezvous}, which this machine cannot reach; name another one")
        time.sleep(1.0)


def is_here(host: str) -> bool:
    """Whether the name is one of this machine: only then can an address of it be bound."""
    for family, *_, address in addresses(host, "0"):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind(address)
            return True
    return False


def answers(host: str, port: str) -> bool:
    for family, *_, address in addresses(host, port):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.settimeout(5.0)
            tried.connect(address)
            return True
    return False


def addresses(host: str, port: str) -> list[Any]:
    """None while the name is unknown: a name server may learn it later."""
    try:
        return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return []


def without_rendezvous(error: Exception, launcher: LauncherOptions, folder: Path) -> WorkerError:
    """Print that the machines have not met, or that this one has lost the others."""
    if any(folder.glob(STARTED)):
        line = f"the connection to the rendezvous {launcher.rendezvous} is lost: a machine has ended or cannot be reached; "
        line += "the processes here were ended; resume=auto continues from the last checkpoint"
    else:
        line = f"{launcher.nodes} machines have not met at launcher.rendezvous={launcher.rendezvous} ({type(error).__name__}); "
        line += "start the same command on each, and let all of them reach that address"
    print(f"drafttrain: {line}", file=sys.stderr)
    return WorkerError(line)


@contextmanager
def not_stuck(launcher: LauncherOptions, folder: Path, show: Callable[[int], None]) -> Iterator[None]:
    """End this process with code 1 if torch does not, after all processes have ended by a failure.

    Its calls to the machine of the rendezvous have no time limit. On a machine that is cut off they last a quarter of an hour.
    show: prints the output of a rank.
    """
    if launcher.nodes == 1 or launcher.restarts:  # restarting, it waits for the others
        yield
        return
    done = threading.Event()

    def watch() -> None:
        since = time.monotonic()
        while not done.wait(0.5):
            ranks = failed_ranks(folder)
            if not ranks:
                since = time.monotonic()
            elif time.monotonic() - since > STUCK:
                show(ranks[0])
                shutil.rmtree(folder, ignore_errors=True)
                multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # otherwise the tracker of semaphores warns of them
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def failed_ranks(folder: Path) -> list[int]:
    """The ranks of this machine that have failed; none while any process runs, or if another reason has ended them."""
    if (folder / SIGNALLED).exists() or any(folder.glob(NOTES)) or any(folder.glob(INTERRUPTIONS)):
        return []
    started = [file.name.split("-")[1:] for file in folder.glob(STARTED)]
    if any(runs(int(process)) for process, _ in started):
        return []
    return sorted(int(rank) for process, rank in started if not (folder / ENDED.replace("*", process)).exists())


def runs(process: int) -> bool:
    """Whether the child process runs. One that has ended may wait for its parent to notice."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
