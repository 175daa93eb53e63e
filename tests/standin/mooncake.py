"""A real `mooncake_master` and a process that puts objects, on this machine's loopback.

`python -m tests.standin.mooncake MASTER SEGMENT` puts what each line `KEY NBYTES SEED` of stdin says, and prints the status.

Shapes: N bytes.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.features.mooncake_store import mooncake
from tests.standin.states_server import STANDIN_HOST

ROOT = Path(__file__).parents[2]
needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="needs Mooncake: pip install 'drafttrain[mooncake]'"
)


# below those that systems give to clients and to servers without a wish, and another one for each process of pytest's
PORTS = count(20_000 + os.getpid() % 100 * 100)


def free_port() -> int:
    """A port on which nothing listens, and that nobody gets before it is used."""
    for port in PORTS:
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError


@dataclass
class Master:
    """A master's process. It can be killed and started again at the same address."""

    address: str
    process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        import mooncake

        host, port = self.address.rsplit(":", 1)
        binary = Path(mooncake.__file__).parent / "mooncake_master"
        binary.chmod(0o755)
        command = [str(binary), f"--rpc_address={host}", f"--rpc_port={port}", f"--metrics_port={free_port()}"]
        return [*command, "--metrics_host=127.0.0.1", "--enable_metric_reporting=false"]

    def start(self) -> Master:
        host, port = self.address.rsplit(":", 1)
        self.process = subprocess.Popen(self.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                socket.create_connection((host, int(port)), 1).close()
                return self
            except OSError:
                time.sleep(0.05)
        raise AssertionError("mooncake_master does not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Producer:
    """A process that puts objects from its own memory."""

    def __init__(self, master: str, segment: int = 64 << 20) -> None:
        command = [sys.executable, "-m", "tests.standin.mooncake", master, str(segment)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def put(self, key: str, nbytes: int, seed: int = 0) -> int:
        """Mooncake's status."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(key, nbytes, seed, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def content(nbytes: int, seed: int) -> Tensor:
    """[N] the bytes of an object."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def connected(master: str, segment: int, host: str | None = None) -> Any:
    """A client of Mooncake that gives the store so many bytes of memory. host: this machine's address for the others."""
    client, host = mooncake().MooncakeDistributedStore(), host or os.environ.get(STANDIN_HOST, "127.0.0.1")
    assert client.setup(host, "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", master) == 0
    return client


def remove_left(master: str) -> int:
    """Remove all objects that trainers have left in the store; how many."""
    client = connected(master, 0)
    try:
        return int(client.remove_by_regex("drafttrain-", force=True))
    finally:
        client.close()


def main() -> None:
    client = connected(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        key, nbytes, seed = line.split()
        print(client.put(key, content(int(nbytes), int(seed)).numpy().tobytes()), flush=True)


if __name__ == "__main__":
    main()
