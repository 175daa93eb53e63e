"""Meeting other machines: waiting for them, losing them, and what is said."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from drafttrain.cli import launch, worker
from drafttrain.core.errors import WorkerError
from drafttrain.runs.options import LauncherOptions

TWO = LauncherOptions(nodes=2, rendezvous="first:29400")


def test_wait_for_rendezvous_polls_until_answer_or_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waits.append)
    monkeypatch.setattr(launch, "answers", lambda host, port: (host, port) == ("first", "29400") and len(waits) == 3)
    launch.wait_for_rendezvous(TWO)
    assert waits == [1.0, 1.0, 1.0]
    monkeypatch.setattr(launch, "JOINING", -1.0)
    monkeypatch.setattr(launch, "answers", lambda host, port: False)
    with pytest.raises(RendezvousTimeoutError):
        launch.wait_for_rendezvous(TWO)


def test_rendezvous_local_names_and_open_ports_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.is_here("localhost") and launch.is_here("[::1]") | launch.is_here("127.0.0.1")
    assert not launch.is_here("192.0.2.1")  # an address that no machine has
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert launch.answers("127.0.0.1", str(server.getsockname()[1]))
    with socket.socket() as silent:  # it keeps its port, and does not listen
        silent.bind(("127.0.0.1", 0))
        assert not launch.answers("127.0.0.1", str(silent.getsockname()[1]))

    def unknown(*_: object, **__: object) -> None:  # some name servers answer every name
        raise socket.gaierror

    monkeypatch.setattr(launch.socket, "getaddrinfo", unknown)
    assert not launch.is_here("no-such-machine.invalid") and not launch.answers("no-such-machine.invalid", "29400")


def test_rendezvous_failure_message_depends_on_whether_machines_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(launch.without_rendezvous(RendezvousTimeoutError(), TWO, tmp_path), WorkerError)
    assert "2 machines have not met at launcher.rendezvous=first:29400" in capsys.readouterr().err
    (tmp_path / worker.STARTED.replace("*", "7-0")).touch()
    launch.without_rendezvous(RendezvousConnectionError(), TWO, tmp_path)
    assert "the connection to the rendezvous first:29400 is lost" in capsys.readouterr().err


def test_failed_ranks_are_dead_processes_without_recorded_reason(tmp_path: Path) -> None:
    running, ended = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        (tmp_path / worker.STARTED.replace("*", f"{ended.pid}-4")).touch()
        (tmp_path / worker.STARTED.replace("*", f"{running.pid}-5")).touch()
        assert launch.failed_ranks(tmp_path) == []
        running.kill()
        running.wait()
        assert launch.failed_ranks(tmp_path) == [4, 5]
        (tmp_path / worker.ENDED.replace("*", str(ended.pid))).touch()
        assert launch.failed_ranks(tmp_path) == [5]
        (tmp_path / worker.NOTES.replace("*", "00005")).touch()
        assert launch.failed_ranks(tmp_path) == []
    finally:
        for process in (running, ended):
            process.kill()
            process.wait()


ERRORS = [
    (RuntimeError("[/pytorch/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:41"), True),
    (RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), True),
    (DistStoreError("the store does not answer"), True),
    (RuntimeError("shapes do not match"), False),
]


def test_lost_connection_is_distinguished_from_bug(subtests: pytest.Subtests) -> None:
    for error, lost in ERRORS:
        with subtests.test(error=error):
            assert (worker.lost_connection(error) is not None) is lost


def test_lost_connection_reason_omits_source_location() -> None:
    gloo = RuntimeError("[/pytorch/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:41")
    assert worker.lost_connection(gloo) == "Connection closed by peer [10.0.0.3]:41"
