"""A machine of servers and its trainers, which meet by files: who waits for whom, and how long."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafttrain.engines.states_server import ServedStates
from drafttrain.features import FeatureOptions
from drafttrain.runs import serve_trainers
from drafttrain.runs.serve_trainers import SILENT, _Machine
from drafttrain.runs.server_machines import Machine, Wanted, answer, earlier_answer

SERVED = ServedStates("vllm", "target", (1, 4), 64, "/states", "float32")


def test_server_machine_trainers_are_not_lost_while_servers_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large target loads for longer than the silence after which trainers count as lost."""
    now = 0.0
    monkeypatch.setattr(serve_trainers, "monotonic", lambda: now)
    machine = _Machine(FeatureOptions("engine", nodes=1), tmp_path, "127.0.0.1", lambda line: None)

    def load(self: _Machine, found: Wanted) -> None:
        nonlocal now
        now += 1.5 * SILENT
        self.wanted = found

    monkeypatch.setattr(_Machine, "_answer", load)
    first = Wanted("a", 0, SERVED)
    machine._look(first)
    machine._look(replace(first, beat=1))
    assert machine.wanted is not None
    now += 0.9 * SILENT
    machine._look(replace(first, beat=1))
    now += 0.2 * SILENT
    with pytest.raises(serve_trainers.WorkerError, match="the trainers are lost"):
        machine._look(replace(first, beat=1))


def test_earlier_answer_stale_file_handle_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: what was opened is gone on the server (ESTALE)."""
    said = Machine("a", ("http://a:1",))
    answer(tmp_path, said)
    read, failures = Path.read_text, [errno.ESTALE, errno.ESTALE]

    def stale(self: Path, *given: Any, **named: Any) -> str:
        if failures:
            raise OSError(failures.pop(), "stale file handle")
        return read(self, *given, **named)

    monkeypatch.setattr(Path, "read_text", stale)
    assert earlier_answer(tmp_path) == said
    failures.append(errno.EACCES)
    with pytest.raises(OSError, match="stale"):
        earlier_answer(tmp_path)
