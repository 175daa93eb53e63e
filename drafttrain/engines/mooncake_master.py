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
from drafttrain.engines.states_server import HERE, LOOK, STARTS, free_ports, kill

START = 60.0  # seconds until it must answer
INSTALL = "pip install 'drafttrain[mooncake]'"


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
        deadline = monotonic() + START
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
