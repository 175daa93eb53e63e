"""A server of states on this machine, for the time of a training run. Only vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import urlopen

from drafttrain.core.errors import UserError
from drafttrain.engines.process import ENGINES, SCRIPTS, SHOWN, environment

CONNECTORS = SCRIPTS / "connectors"
CPU_CONNECTOR = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "drafttrain_cpu_connector"}
CPU_MOONCAKE = {"kv_connector": "CpuMooncakeConnector", "kv_connector_module_path": "drafttrain_cpu_mooncake"}
START = 1200.0  # seconds until a server must answer: it may load a large target, and compile
LOOK, PATIENCE = 0.5, 30.0  # seconds between two looks at a server, and for it to end by itself
STARTS = 5  # of a server that ends by itself
SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB of the cache on a CPU, 1 unless the user sets it


@dataclass
class StatesServer:
    """A server's process. It is started again when it ends by itself, `STARTS` times at most."""

    python: Path
    arguments: Sequence[str]  # of `vllm`, without its address
    log: Path
    say: Callable[[str], None]
    port: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process."""
        self.port = self.port or free_port()
        known = environment(ENGINES["vllm"])
        known["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # of a conversation with all positions: the answer's is never computed
        known[SPACE] = os.environ.get(SPACE, known[SPACE])
        known.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # without its own process an engine writes the last file only later
        command = [str(self.python), "-P", str(SCRIPTS / "vllm_states.py"), *self.arguments]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                env=known | {"PYTHONPATH": str(CONNECTORS)}, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until it answers. Raises UserError with its last lines where it does not."""
        assert self.process is not None
        until = monotonic() + START
        while monotonic() < until:
            if (code := self.process.poll()) is not None:
                raise UserError(f"vLLM ended with {code} as it started: {' | '.join(_errors(self.log)) or 'its log is empty'}")
            with suppress(URLError, OSError), urlopen(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            sleep(LOOK)
        raise UserError(f"vLLM does not answer {START:g} s after its start; see {self.log}")

    def watch(self) -> None:
        """Start the process again where it ends by itself, until `end`."""
        assert self.process is not None
        for _ in range(STARTS):
            while (code := self.process.poll()) is None:
                if self.closing.wait(LOOK):
                    return
            if self.closing.is_set():
                return
            self.say(f"features: vLLM ended with {code} ({' | '.join(_errors(self.log)[-1:])}); it starts again")
            kill(self.process)
            self.start()

    def end(self) -> None:
        """End the process and its children."""
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        kill(self.process)


@contextmanager
def states_server(python: Path, arguments: Sequence[str], log: Path, say: Callable[[str], None]) -> Iterator[StatesServer]:
    """A server that answers. arguments: of `vllm`, without its address.

    Raises UserError with the engine's own message where it does not start.
    """
    server = StatesServer(python, arguments, log, say)
    watching = threading.Thread(target=server.watch, daemon=True)
    try:
        server.start()
        server.wait()
        watching.start()
        yield server
    finally:
        server.closing.set()
        if watching.ident is not None:
            watching.join()
        server.end()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, with its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _errors(log: Path) -> list[str]:
    """The last lines of a log that name an error, else its last lines."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines)[-SHOWN // 4 :]
