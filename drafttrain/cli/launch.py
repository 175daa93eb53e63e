"""Runs a command here, or in `launcher.nproc` processes on each of `launcher.nodes` machines, which meet and may be lost."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.cli.worker import ENDED, INTERRUPTIONS, MADE, NOTES, SIGNALLED, STARTED, log_of, work_in_process
from drafttrain.core.errors import Interrupted, UserError, WorkerError
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.runs.server_machines import MEETING, end, meeting_folder
from drafttrain.train.interrupt import SAVING, SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig


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


Work = Callable[[RunOptions, dict[str, Any]], object]
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_RESTART_COUNT")  # variables of launchers
LAST = 20  # lines of a failed process's log to show


def launch(work: Work, options: RunOptions, resolved: dict[str, Any]) -> Path | None:
    """Call `work(options, resolved)` in this process, or in every process of a new group, with torchrun's environment.

    Returns the path that `work` returns on rank 0; None if it returns something else, or rank 0 is on another machine.

    work: a module-level function, because other processes import it by name.
    Raises UserError for bad `launcher` options and for a UserError of any process, Interrupted when a signal has ended the
    processes, and WorkerError when a process fails for another reason; then the end of its log is printed to stderr.
    """
    launcher = options.launcher
    check_variables()
    check_launcher(options)
    if launcher.nodes > 1 and (launcher.rendezvous is None or ":" not in launcher.rendezvous):
        raise UserError(
            f"launcher.rendezvous is {launcher.rendezvous!r} with launcher.nodes={launcher.nodes}; set it to HOST:PORT, a "
            "machine and a free port on it, the same on all machines"
        )
    if launcher.role == "server":
        _serve(options)
        return None
    nproc = 1 if "RANK" in os.environ and launcher.nproc == "auto" else _processes(options)
    trainers = replace(launcher, nproc=nproc, nodes=launcher.nodes - options.features.nodes)
    with _told_to_servers(options):
        return _launch(work, replace(options, launcher=trainers), resolved)


def check_launcher(options: RunOptions) -> None:
    """Raise UserError for launcher options that do not fit each other, or the machines that `features` asks for."""
    launcher, features = options.launcher, options.features
    if features.name == "engine":
        features.check_started()
    if launcher.role == "server" and not features.nodes:
        raise UserError("launcher.role is server, but features.nodes is 0; set it to the number of machines that run servers")
    if not features.nodes:
        return
    if features.name != "engine":
        raise UserError(f"features.nodes is {features.nodes}, but features={features.name} has no servers; leave it out")
    if features.nodes >= launcher.nodes:
        raise UserError(
            f"features.nodes is {features.nodes} of launcher.nodes={launcher.nodes}, so no machine trains; set features.nodes "
            "lower, or launcher.nodes to the number of all machines"
        )
    if features.transport == "mooncake" and features.mooncake.master is None:
        raise UserError(
            f"features.nodes is {features.nodes}, but features.mooncake.master is empty; start mooncake_master on a machine "
            "that all others reach, and give its HOST:PORT"
        )
    if features.transport == "files" and features.dir is None:
        raise UserError(f"features.nodes is {features.nodes}, but features.dir is not set; name a folder that all machines see")
    if "RANK" in os.environ:
        raise UserError(
            f"features.nodes is {features.nodes} under torchrun, which starts training processes alone; start them with "
            "launcher.nodes, or start servers by hand and name them in features.servers"
        )


def _processes(options: RunOptions) -> int:
    if options.launcher.nproc != "auto":
        return options.launcher.processes
    return import_module("drafttrain.runs.server_machines").processes_of(options)  # it imports torch, which takes long


def _serve(options: RunOptions) -> None:
    """Run servers on this machine until the trainers have ended."""
    address = address_towards(options.launcher)
    import_module("drafttrain.runs.serve_trainers").serve_trainers(options, meeting_folder(options), address, print_now)


@contextmanager
def _told_to_servers(options: RunOptions) -> Iterator[None]:
    """Training processes find the machines of servers, which end with them."""
    if not options.features.nodes:
        yield
        return
    folder = meeting_folder(options)
    os.environ[MEETING] = str(folder)
    try:
        yield
    finally:
        del os.environ[MEETING]
        end(folder)


def print_now(text: str) -> None:
    print(text, flush=True)


def check_variables() -> None:
    """Raise UserError for a number of a process, as launchers give it in the environment, that is none."""
    for name in NUMBERS:
        if not (value := os.environ.get(name, "0")).strip().isdigit():
            raise UserError(
                f"{name} is {value!r} in the environment, expected a number, as launchers give it; unset {name} if none did"
            )


def _launch(work: Work, options: RunOptions, resolved: dict[str, Any]) -> Path | None:
    launcher = options.launcher
    if launcher.nproc == launcher.nodes == 1 and not launcher.restarts:
        command_result = work(options, resolved)
        return command_result if isinstance(command_result, Path) else None
    if "RANK" in os.environ:
        raise UserError(
            f"launcher.nproc={launcher.nproc} under torchrun, which has already started the processes, as RANK="
            f"{os.environ['RANK']} in the environment says; leave out launcher.nproc, nodes and restarts, or unset RANK"
        )
    with tempfile.TemporaryDirectory(prefix="drafttrain-") as folder:
        return _launch_here(work, options, resolved, Path(folder))


def _launch_here(work: Work, options: RunOptions, resolved: dict[str, Any], folder: Path) -> Path | None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.launcher.processes)))
    for library in ("torch.distributed", "torch.multiprocessing.spawn"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # the processes report errors themselves
    _start_tracker()
    try:
        show = partial(_show, options, folder, "failed")
        with _forwarding(folder, options.launcher.nodes > 1), not_stuck(options.launcher, folder, show):
            wait_for_rendezvous(options.launcher)
            elastic_launch(_config(options, folder.name), work_in_process)(work, options, resolved, folder)
    except SignalException as error:  # torchelastic has caught Ctrl-C and ended the processes
        raise KeyboardInterrupt from error
    except RendezvousError as error:
        _raise_interrupted(folder)
        raise without_rendezvous(error, options.launcher, folder) from error
    except ChildFailedError as error:
        # torchelastic ends the other processes by a signal: their interruption is not the cause
        if (folder / SIGNALLED).exists() or error.get_first_failure()[1].exitcode == Interrupted.CODE:
            _raise_interrupted(folder)
        for note in sorted(folder.glob(NOTES)):
            raise UserError(note.read_text(encoding="utf-8")) from error
        raise _shown(error, options, folder) from error
    _raise_interrupted(folder)
    return Path((folder / MADE).read_text(encoding="utf-8")) if (folder / MADE).exists() else None


def _start_tracker() -> None:
    """Start multiprocessing's process that removes semaphores, with SIGUSR1 blocked.

    Slurm sends the signal to every process of a job. It would end the tracker, whose successor prints a traceback for each
    semaphore.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _config(options: RunOptions, name: str) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    launcher, hang_timeout = options.launcher, options.train.hang_timeout
    on_this_machine = launcher.nodes == 1 or str(launcher.rendezvous).split(":")[0] in ("localhost", "127.0.0.1")
    return LaunchConfig(
        min_nodes=launcher.nodes,
        max_nodes=launcher.nodes,
        nproc_per_node=launcher.processes,
        run_id=name if launcher.nodes == 1 else "drafttrain",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if launcher.nodes == 1 else str(launcher.rendezvous),
        rdzv_configs={"read_timeout": max(1, int(min(CALL, hang_timeout or CALL))), "join_timeout": int(JOINING)},
        max_restarts=launcher.restarts,
        local_addr="localhost" if on_this_machine else None,
        signals_to_handle="SIGHUP,SIGQUIT",  # other signals are ours: it would kill the processes after 30 seconds
    )


@contextmanager
def _forwarding(folder: Path, several: bool) -> Iterator[None]:
    """Forward signals to the child processes, which save and end. A second Ctrl-C kills them.

    A terminal sends Ctrl-C to the children too. They ignore it, and get SIGTERM from here instead. several: there are several
    machines: while this one waits for the others, a signal ends it at once.
    """
    ctrl_c_seen, parent_pid = False, os.getpid()

    def forward(number: int, frame: object) -> None:
        nonlocal ctrl_c_seen
        if os.getpid() != parent_pid:  # in a process that was forked, and has no handler of its own yet
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        (folder / SIGNALLED).touch()
        again, ctrl_c_seen = ctrl_c_seen and number == signal.SIGINT, ctrl_c_seen or number == signal.SIGINT
        if ctrl_c_seen and not again:
            os.write(2, SAVING)
        children = multiprocessing.active_children()
        if several and not children and not any(folder.glob(STARTED)):
            raise Interrupted("before the machines had met")
        for child in children:
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
    messages = [file.read_text(encoding="utf-8") for file in sorted(folder.glob(INTERRUPTIONS))]
    if messages or (folder / SIGNALLED).exists():
        raise Interrupted(messages[0] if messages else "by a signal")


def _shown(error: ChildFailedError, options: RunOptions, folder: Path) -> WorkerError:
    """Show the first process that failed."""
    rank, failure = error.get_first_failure()
    ending = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"code {failure.exitcode}"
    _show(options, folder, f"ended with {ending}", rank)
    return WorkerError(f"rank {rank} ended with {ending}")


def _show(options: RunOptions, folder: Path, ending: str, rank: int) -> None:
    """Keep the logs of all processes, and print the end of this one's log."""
    log_folder = Path(options.output) / options.name / "logs" / time.strftime("%Y-%m-%d_%H-%M-%S")
    with suppress(OSError):  # a full disk must not hide what failed
        shutil.copytree(folder, log_folder, dirs_exist_ok=True)
    log = log_of(folder, rank)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST:] if log.exists() else []
    print("\n".join([*lines, f"drafttrain: rank {rank} {ending}; output of all ranks: {log_folder}"]), file=sys.stderr)
