"""Servers of states on this machine, for the time of a training run: vLLM's, and a `mooncake_master`."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from drafttrain.core.errors import UserError
from drafttrain.engines.process import SCRIPTS, SHOWN

START = 1200.0  # seconds until a server must answer: it may load a large target, and compile
LOOK, PATIENCE = 0.5, 30.0  # seconds between two looks at a server, and for it to end by itself
STARTS = 5  # of a server that ends by itself
HERE = "127.0.0.1"
MASTER_START = 60.0  # seconds until a `mooncake_master` must answer
INSTALL = "pip install 'drafttrain[mooncake]'"


@dataclass
class StatesServer:
    """A server's process. It is started again when it ends by itself, `STARTS` times at most."""

    python: Path
    arguments: Sequence[str]  # of `vllm`, without its address
    environment: Mapping[str, str]
    log: Path
    say: Callable[[str], None]
    port: int
    host: str = HERE  # the address at which it listens
    name: str = "vLLM"  # in messages
    closing: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[bytes] | None = None
    lost: str | None = None  # why it is not started again

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def start(self) -> None:
        """Start the process."""
        command = [str(self.python), "-P", str(SCRIPTS / "vllm_states.py"), *self.arguments]
        command += ["--host", self.host, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=self.environment,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until it answers. Raises UserError with its last lines where it does not."""
        assert self.process is not None
        deadline, opener = monotonic() + START, build_opener(ProxyHandler({}))  # a proxy does not reach this machine
        while monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                log_tail = " | ".join(_errors(self.log)) or "its log is empty"
                raise UserError(f"{self.name} ended with {code} as it started: {log_tail}")
            with suppress(URLError, OSError), opener.open(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            sleep(LOOK)
        raise UserError(f"{self.name} does not answer {START:g} s after its start; see {self.log}")

    def watch(self) -> None:
        """Start the process again where it ends by itself, until `closing`."""
        assert self.process is not None
        for restarts in range(STARTS + 1):
            while (code := self.process.poll()) is None:
                if self.closing.wait(LOOK):
                    return
            if self.closing.is_set():
                return
            message = f"{self.name} ended with {code} ({' | '.join(_errors(self.log)[-1:])})"
            kill(self.process)
            if restarts == STARTS:
                self.lost = f"{message} after {STARTS} new starts, and is not started again"
                self.say(f"features: {self.lost}")
                return
            self.say(f"features: {message}; it starts again")
            self.start()

    def ask_to_end(self) -> None:
        """Send the process SIGTERM."""
        if self.process is not None:
            self.process.terminate()

    def end(self) -> None:
        """Wait for the process and its children to end, and kill them after `PATIENCE`."""
        if self.process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        kill(self.process)


@contextmanager
def running(servers: Sequence[StatesServer]) -> Iterator[None]:
    """Start the servers, wait until all answer, and watch over them; they end with the context.

    Raises UserError with the engine's own message where one does not start.
    """
    with ExitStack() as stack:
        stack.callback(_end, servers)
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        for server in servers:
            watch_thread = threading.Thread(target=server.watch, daemon=True)
            watch_thread.start()
            stack.callback(watch_thread.join)
            stack.callback(server.closing.set)
        yield


def free_ports(count: int, host: str = HERE) -> list[int]:
    """Ports of this address that nothing uses."""
    with ExitStack() as stack:  # all are held until the last one is found, so that none comes twice
        sockets = [stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) for _ in range(count)]
        for sock in sockets:
            sock.bind((host, 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def _end(servers: Sequence[StatesServer]) -> None:
    for server in servers:
        server.closing.set()
    for server in servers:
        server.ask_to_end()
    for server in servers:
        server.end()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, with its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _errors(log: Path) -> list[str]:
    """The last lines of a log that name an error, else its last lines."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    error_lines = [line for line in lines if "Error: " in line]
    return (error_lines or lines)[-SHOWN // 4 :]


@dataclass
class Master:
    """The process. It is started again when it ends by itself, `STARTS` times at most."""

    program: Path
    log: Path
    say: Callable[[str], None]
    port: int = field(default_factory=lambda: free_ports(1)[0])
    closing: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HERE}:{self.port}"

    def start(self) -> None:
        """Start the process, and wait until it answers. Raises UserError where it does not."""
        command = [sys.executable, "-P", str(SCRIPTS / "followed.py"), str(self.program)]
        command += [f"--rpc_address={HERE}", f"--rpc_port={self.port}"]
        command += [f"--metrics_host={HERE}", f"--metrics_port={free_ports(1)[0]}", "--enable_metric_reporting=false"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        deadline = monotonic() + MASTER_START
        while monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError), socket.create_connection((HERE, self.port), LOOK):
                return
            sleep(LOOK / 10)
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise UserError(f"mooncake_master does not start: {' | '.join(lines[-3:]) or 'its log is empty'}")

    def watch(self) -> None:
        """Start the process again where it ends by itself, until it is closed."""
        for _ in range(STARTS):
            assert self.process is not None
            while self.process.poll() is None:
                if self.closing.wait(LOOK):
                    return
            if self.closing.is_set():
                return
            self.say("features: mooncake_master ended; it starts again")
            kill(self.process)
            with suppress(UserError):  # the requests fail, and end the run after their patience
                self.start()


@contextmanager
def mooncake_master(log: Path, say: Callable[[str], None]) -> Iterator[str]:
    """A master that answers; its address. Raises UserError where Mooncake is not installed, or the master does not start."""
    spec = importlib.util.find_spec("mooncake")
    programs = [Path(folder) / "mooncake_master" for folder in (spec.submodule_search_locations or ())] if spec else []
    if not programs or not programs[0].is_file():
        raise UserError(f"Mooncake is not installed, so that no mooncake_master can be started; {INSTALL}")
    with suppress(OSError):  # wheels may be unpacked without the bit
        programs[0].chmod(programs[0].stat().st_mode | 0o100)
    master = Master(programs[0], log, say)
    watch_thread = threading.Thread(target=master.watch, daemon=True)
    try:
        master.start()
        watch_thread.start()
        yield master.address
    finally:
        master.closing.set()
        if watch_thread.ident is not None:
            watch_thread.join()
        if master.process is not None:
            kill(master.process)
