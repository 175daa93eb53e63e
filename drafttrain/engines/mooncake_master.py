"""A `mooncake_master` on this machine, for the time of a training run."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

from drafttrain.core.errors import UserError
from drafttrain.engines.process import SCRIPTS
from drafttrain.engines.states_server import LOOK, STARTS, free_port, kill

HOST = "127.0.0.1"
START = 60.0  # seconds until it must answer
INSTALL = "pip install 'drafttrain[mooncake]'"


@dataclass
class Master:
    """The process. It is started again when it ends by itself, `STARTS` times at most."""

    program: Path
    log: Path
    say: Callable[[str], None]
    port: int = field(default_factory=free_port)
    closing: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        """Start the process, and wait until it answers. Raises UserError where it does not."""
        command = [sys.executable, "-P", str(SCRIPTS / "followed.py"), str(self.program)]
        command += [f"--rpc_address={HOST}", f"--rpc_port={self.port}"]
        command += [f"--metrics_host={HOST}", f"--metrics_port={free_port()}", "--enable_metric_reporting=false"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        until = monotonic() + START
        while monotonic() < until and self.process.poll() is None:
            with suppress(OSError), socket.create_connection((HOST, self.port), LOOK):
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
    found = importlib.util.find_spec("mooncake")
    programs = [Path(folder) / "mooncake_master" for folder in (found.submodule_search_locations or ())] if found else []
    if not programs or not programs[0].is_file():
        raise UserError(f"Mooncake is not installed, so that no mooncake_master can be started; {INSTALL}")
    with suppress(OSError):  # wheels may be unpacked without the bit
        programs[0].chmod(programs[0].stat().st_mode | 0o100)
    master = Master(programs[0], log, say)
    watching = threading.Thread(target=master.watch, daemon=True)
    try:
        master.start()
        watching.start()
        yield master.address
    finally:
        master.closing.set()
        if watching.ident is not None:
            watching.join()
        if master.process is not None:
            kill(master.process)
