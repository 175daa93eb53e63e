"""A machine that runs servers of states for trainers on other machines, from their request until training has ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

from drafttrain.core.errors import UserError, WorkerError
from drafttrain.core.files import HOST
from drafttrain.engines.process import python_of
from drafttrain.engines.states_server import ServedStates, StatesServer, free_ports, running, server_process
from drafttrain.features import FeatureOptions
from drafttrain.runs.options import RunOptions
from drafttrain.runs.server_machines import (
    LOOK,
    Machine,
    Wanted,
    answer,
    earlier_answer,
    leave,
    servers_alone,
    visible_gpus,
    wanted,
)
from drafttrain.train.interrupt import Interrupt

SILENT = 600.0  # seconds without a sign of life after which the trainers count as lost
GONE = 3  # looks without a request after which training has ended: a folder on a network may be late
SEEN = 30.0  # seconds for a new folder to be seen on another machine
KEY = "VLLM_API_KEY"


def serve_trainers(options: RunOptions, folder: Path, address: str, say: Callable[[str], None]) -> None:
    """Run the servers. folder: where trainers and servers meet. address: of this machine, as the trainers reach it.

    Raises UserError where servers do not start or do not stay, WorkerError where the trainers are lost, and Interrupted at a
    signal.
    """
    say(f"features: this machine runs servers at {address}; it waits for the trainers, in {folder}")
    machine = _Machine(options.features, folder, address, say)
    with _until_trainers_end() if "SLURM_JOB_ID" in os.environ else Interrupt():
        try:
            machine.run()
        except UserError as error:
            if machine.wanted is not None:  # the trainers end with the same line
                answer(folder, Machine(machine.wanted.id, error=f"servers on {HOST}: {error}"))
            raise
    leave(folder)


@contextmanager
def _until_trainers_end() -> Iterator[None]:
    """Act on no signal: Slurm sends it to all processes of a job, and trainers that finish their step and save need states."""
    old_sigterm = signal.signal(signal.SIGTERM, lambda number, frame: None)  # not ignored: servers would inherit that
    old_sigusr1 = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # servers inherit that
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_sigterm)
        signal.signal(signal.SIGUSR1, old_sigusr1)


@dataclass
class _Machine:
    features: FeatureOptions
    folder: Path
    address: str
    say: Callable[[str], None]
    wanted: Wanted | None = None  # the request that is answered
    servers: Sequence[StatesServer] = ()
    running: ExitStack = field(default_factory=ExitStack)
    last: Wanted | None = None  # as it was found at the last look
    heard: float = 0.0  # when it was found to be another one, of `monotonic`
    gone: int = 0  # looks since then that have found none

    def run(self) -> None:
        """Until training has ended."""
        with self.running:
            while self.wanted is None or self.gone < GONE:
                self._look(wanted(self.folder))
                sleep(LOOK)
        self.say("features: training has ended")
        shutil.rmtree(self.wanted.served.folder, ignore_errors=True)

    def _look(self, request: Wanted | None) -> None:
        self.gone = 0 if request is not None else self.gone + 1
        if request is not None and request != self.last:
            self.heard = monotonic()
            is_answered = self.wanted is not None and self.wanted.id == request.id
            if self.last is not None and self.last.id == request.id and not is_answered:
                self._answer(request)  # its beat has changed: it is not that of a run that was killed
                self.heard = monotonic()  # nothing was looked at while the servers loaded the target
            self.last = request
        if self.wanted is not None and monotonic() - self.heard > SILENT:
            self.say(f"features: no sign of the trainers for {SILENT:g} s; the servers here end")
            raise WorkerError("the trainers are lost")
        if self.servers and all(server.lost for server in self.servers):
            raise UserError(f"{self.servers[0].lost}; its log is {self.servers[0].log}")

    def _answer(self, request: Wanted) -> None:
        """Run the servers that are asked for, and say where they are."""
        previous, self.wanted = self.wanted, request
        if previous is None or previous.served != request.served:
            self.running.close()
            gpus = servers_alone(self.features, visible_gpus())
            self.servers = self._made(request, gpus.of_servers)
            self.say(f"features: starting vLLM for the trainers: {gpus}; this takes a minute or more")
            self.running.enter_context(running(self.servers))
        answer(self.folder, Machine(request.id, tuple(server.url for server in self.servers)))
        self.say(f"features: {' and '.join(server.url for server in self.servers)} give states")

    def _made(self, request: Wanted, gpus: Sequence[Sequence[str]]) -> list[StatesServer]:
        features, served = self.features, request.served
        python = python_of(served.engine, features.python, "features.python")
        _check_folder(served)
        previous_answer = earlier_answer(self.folder)
        ports = (
            [urlsplit(url).port or 0 for url in previous_answer.urls]
            if previous_answer is not None and previous_answer.id == request.id
            else []
        )
        if len(ports) == len(gpus):
            _wait_for_ports(ports, self.address)
        else:
            ports = free_ports(len(gpus), self.address)
        servers = []
        for i, (server_gpus, port) in enumerate(zip(gpus, ports, strict=True), start=1):
            arguments, environment = server_process(
                served, server_gpus, features.tensor_parallel, not server_gpus, self.address
            )
            if key := os.environ.get(features.key_env):
                environment[KEY] = key  # others on the network reach this server too
            log = Path(served.folder) / f"vllm-{HOST}-{i}.log"
            servers.append(
                StatesServer(python, arguments, environment, log, self.say, port, self.address, f"vLLM {i} on {HOST}")
            )
        return servers


def _check_folder(served: ServedStates) -> None:
    deadline = monotonic() + SEEN
    while not Path(served.folder).is_dir():
        if monotonic() > deadline:
            raise UserError(
                f"{served.folder} of the trainers is not there; set features.dir to a folder that all machines of the run see"
            )
        sleep(LOOK)


def _wait_for_ports(ports: Sequence[int], address: str) -> None:
    """Wait until the servers of a process that was killed have ended: they do so by themselves."""
    deadline = monotonic() + SEEN
    for port in ports:
        while monotonic() < deadline:
            with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe_socket:
                probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe_socket.bind((address, port))
                break
            sleep(LOOK)
