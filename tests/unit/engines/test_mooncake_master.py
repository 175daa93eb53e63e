"""A real mooncake_master for the time of a run: it comes back, and ends with the trainer, also with a killed one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from drafttrain.engines.states_server import mooncake_master
from tests.standin.mooncake import ROOT, needs_mooncake

pytestmark = [pytest.mark.slow, needs_mooncake]
CODE = """
import sys, time
from pathlib import Path
from drafttrain.engines.states_server import mooncake_master
with mooncake_master(Path(sys.argv[1]), print) as address:
    print(address, flush=True)
    time.sleep(600)
"""


def answers(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_mooncake_master_restarts_when_killed_and_ends_with_context(tmp_path: Path) -> None:
    said: list[str] = []
    with mooncake_master(tmp_path / "log", said.append) as address:
        wanted = f"--rpc_port={address.split(':')[1]}"
        own = [one for one in psutil.Process().children(recursive=True) if wanted in one.cmdline()]
        next(one for one in own if one.cmdline()[0].endswith("mooncake_master")).kill()
        wait_for(lambda: bool(said) and answers(address))
        assert said == ["features: mooncake_master ended; it starts again"]
    wait_for(lambda: not answers(address))  # the kernel ends the group, of which only the leader is waited for


def test_mooncake_master_ends_when_trainer_is_killed(tmp_path: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path / "log")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    address = trainer.stdout.readline().strip()
    assert answers(address)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_for(lambda: not answers(address))
