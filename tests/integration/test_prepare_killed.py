"""`prepare` in real processes: killed, and gone on with in another number of them, it writes the same bytes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest

from drafttrain.data.journal import read
from tests import forked

SETTINGS = ["prepare.max_new_tokens=24", "prepare.temperatures=[0,0.8]", "prepare.drop=[empty]", "data.limit=80"]


def command(folder: Path, out: str, *more: str) -> forked.Forked:
    with chdir(folder):
        return forked.start([sys.executable, "-m", "drafttrain", "prepare", f"out={out}", *SETTINGS, *more])


def finished(process: forked.Forked) -> str:
    assert process.wait() == 0, process.said()
    return process.said()


def journaled(folder: Path) -> list[str]:
    return [record["id"] for _, _, record in read(folder / "torn.journal")]


@pytest.mark.slow
def test_prepare_killed_run_resumes_with_other_process_count_identically(tmp_path: Path) -> None:
    finished(command(tmp_path, "whole", "prepare.batch_size=16"))
    before, count = 0, json.loads((tmp_path / "whole" / "summary.json").read_text())["texts"]
    for processes, batch in ((1, 4), (2, 3)):
        process = command(tmp_path, "torn", f"launcher.nproc={processes}", f"prepare.batch_size={batch}")
        while len(journaled(tmp_path)) < before + 10:
            assert process.poll() is None, process.said()
            time.sleep(0.02)
        process.kill()  # and its workers, which are in its group
        before = len(journaled(tmp_path))
        assert not (tmp_path / "torn").exists()
    assert before < count
    shown = finished(command(tmp_path, "torn", "launcher.nproc=2"))
    assert f"{before} of them answered before" in shown
    ids = journaled(tmp_path)
    assert len(ids) == len(set(ids)) == count
    for name in ("part-00000.jsonl", "summary.json", "rejects.jsonl"):
        assert (tmp_path / "torn" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_prepare_terminated_run_exits_75_and_keeps_journal(tmp_path: Path) -> None:
    process = command(tmp_path, "torn", "prepare.batch_size=2")
    while len(journaled(tmp_path)) < 5:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 75
    shown = process.said()
    assert "drafttrain: interrupted by SIGTERM; the same command continues" in shown and "Traceback" not in shown
    ids = journaled(tmp_path)
    assert len(ids) == len(set(ids))
