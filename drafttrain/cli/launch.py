"""Run a command in this process, or in `launcher.nproc` processes on each of `launcher.nodes` machines."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from drafttrain.cli.worker import INTERRUPTED, NOTES, log_of, work_in_process
from drafttrain.core.errors import Interrupted, UserError, WorkerError
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.train.interrupt import SAVING, SIGNALS

Work = Callable[[RunOptions, dict[str, Any]], object]
LAST = 20  # lines of a failed process that are shown


def launch(work: Work, options: RunOptions, resolved: dict[str, Any]) -> None:
    """Call `work(options, resolved)`, here or in every process of a new group with torchrun's environment variables.

    work: a function of a module, since other processes import it by name.
    Raises UserError for bad `launcher` options and for what a process raised it for, Interrupted when a signal has ended the
    processes, and WorkerError when one fails otherwise; its last lines are on stderr then.
    """
    asked = options.launcher
    for name, least in (("nproc", 1), ("nodes", 1), ("restarts", 0)):
        if getattr(asked, name) < least:
            raise UserError(f"launcher.{name} is {getattr(asked, name)}; set it to {least} or more")
    if asked.nproc == asked.nodes == 1 and not asked.restarts:
        work(options, resolved)
        return
    if "RANK" in os.environ:
        raise UserError(
            f"launcher.nproc={asked.nproc} under torchrun, which has started its processes; leave launcher.nproc, nodes and "
            "restarts out"
        )
    if asked.nodes > 1 and (asked.rendezvous is None or ":" not in asked.rendezvous):
        raise UserError(
            f"launcher.rendezvous is {asked.rendezvous!r} with launcher.nodes={asked.nodes}; set it to HOST:PORT, one of the "
            "machines and a free port of it, the same on all of them"
        )
    with tempfile.TemporaryDirectory(prefix="drafttrain-") as folder:
        _launch_here(work, options, resolved, Path(folder))


def _launch_here(work: Work, options: RunOptions, resolved: dict[str, Any], folder: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.launcher.nproc)))
    for library in ("torch.distributed", "torch.multiprocessing.spawn"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # the processes report their own errors
    try:
        with _forwarding(folder / INTERRUPTED):
            elastic_launch(_config(options.launcher, folder.name), work_in_process)(work, options, resolved, folder)
    except SignalException as error:  # the launcher has caught Ctrl-C and ended the processes
        raise KeyboardInterrupt from error
    except ChildFailedError as error:
        _raise_interrupted(folder)
        for note in sorted(folder.glob(NOTES)):
            raise UserError(note.read_text(encoding="utf-8")) from error
        raise _shown(error, options, folder) from error
    _raise_interrupted(folder)


def _config(asked: LauncherOptions, name: str) -> LaunchConfig:
    here = asked.nodes == 1 or str(asked.rendezvous).split(":")[0] in ("localhost", "127.0.0.1")
    return LaunchConfig(
        min_nodes=asked.nodes,
        max_nodes=asked.nodes,
        nproc_per_node=asked.nproc,
        run_id=name if asked.nodes == 1 else "drafttrain",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if asked.nodes == 1 else str(asked.rendezvous),
        max_restarts=asked.restarts,
        local_addr="localhost" if here else None,
        signals_to_handle="SIGHUP,SIGQUIT",  # it would give others half a minute, then SIGKILL
    )


@contextmanager
def _forwarding(note: Path) -> Iterator[None]:
    """What asks this process to stop asks its children, which save and end by themselves; a second Ctrl-C ends them at once.

    They ignore Ctrl-C, which a terminal sends them too, and get SIGTERM for it from here.
    """
    ctrl_c_seen = False

    def forward(number: int, frame: object) -> None:
        nonlocal ctrl_c_seen
        note.touch()
        again, ctrl_c_seen = ctrl_c_seen and number == signal.SIGINT, ctrl_c_seen or number == signal.SIGINT
        if ctrl_c_seen and not again:
            os.write(2, SAVING)
        for child in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                os.kill(child.pid or 0, signal.SIGKILL if again else signal.SIGTERM if number == signal.SIGINT else number)
        if again:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_interrupted(folder: Path) -> None:
    if (note := folder / INTERRUPTED).exists():
        raise Interrupted(note.read_text(encoding="utf-8") or "by a signal")


def _shown(error: ChildFailedError, options: RunOptions, folder: Path) -> WorkerError:
    """Keep every process's output, and show how that of the first to fail ends."""
    rank, failure = error.get_first_failure()
    kept = Path(options.output) / options.name / "logs" / time.strftime("%Y-%m-%d_%H-%M-%S")
    with suppress(OSError):  # a full disk must not hide what failed
        shutil.copytree(folder, kept, dirs_exist_ok=True)
    log = log_of(folder, rank)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST:] if log.exists() else []
    ending = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"code {failure.exitcode}"
    print("\n".join([*lines, f"drafttrain: rank {rank} ended with {ending}; output of all ranks: {kept}"]), file=sys.stderr)
    return WorkerError(f"rank {rank} ended with {ending}")
