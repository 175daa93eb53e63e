"""A process of a launch, told to end: by its launcher, by others, or because the launcher has died."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
import pytest

from drafttrain.cli import worker
from drafttrain.cli.launch import _forwarding
from drafttrain.core.errors import Interrupted
from drafttrain.runs.options import RunOptions


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The calls of os.kill, which does nothing."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: calls.append((pid, number)))
    return calls


def test_orphaned_launcher_that_ends_late_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes with the end of its first thread, and only then the next one ends."""
    parents = iter([7, 7, 7, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    assert worker.orphaned(7, tmp_path)


@pytest.mark.parametrize("signalled", [True, False])
def test_orphaned_is_false_while_launcher_runs(signalled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "DYING", 60.0 if signalled else 0.1)
    if signalled:
        (tmp_path / worker.SIGNALLED).touch()
    assert not worker.orphaned(os.getppid(), tmp_path)


def test_launcher_forwards_no_signal_of_a_forked_process(tmp_path: Path) -> None:
    """Of one that ends another process before it has a handler of its own."""
    with _forwarding(tmp_path, False):
        child = multiprocessing.get_context("fork").Process(target=signal.raise_signal, args=(signal.SIGTERM,))
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGTERM and not (tmp_path / worker.SIGNALLED).exists()


def is_interrupted(options: RunOptions, resolved: dict[str, Any]) -> None:
    raise Interrupted("after step 3", together=True)


def returns_path(options: RunOptions, resolved: dict[str, Any]) -> Path:
    return Path("outputs/run")


def test_worker_leaves_its_path_or_its_interruption_and_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption of all processes together is no failure of this one."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(worker, "outlive_signals", lambda launcher, folder: None)
    for work, name, said in (
        (returns_path, worker.MADE, "outputs/run"),
        (is_interrupted, worker.INTERRUPTIONS, "after step 3"),
    ):
        folder = tmp_path / work.__name__
        folder.mkdir()
        run = (work, RunOptions(), {}, folder)
        child = multiprocessing.get_context("fork").Process(target=worker.work_in_process, args=run)
        child.start()
        child.join()
        (file,) = folder.glob(name)
        assert child.exitcode == 0 and file.read_text(encoding="utf-8") == said
        assert len(list(folder.glob(worker.ENDED))) == 1


def import_for_long(told: Path, survived: Path) -> None:
    """A worker whose launcher dies during its imports."""
    told.write_text(str(os.getpid()), encoding="utf-8")
    launcher = os.getppid()
    while os.getppid() == launcher:
        time.sleep(0.01)
    worker.end_with_parent()
    survived.touch()


def launch_one(*files: Path) -> None:
    multiprocessing.get_context("fork").Process(target=import_for_long, args=files).start()
    signal.pause()


def test_worker_whose_launcher_died_during_its_imports_ends(tmp_path: Path) -> None:
    told, survived = tmp_path / "told", tmp_path / "survived"
    launcher = multiprocessing.get_context("fork").Process(target=launch_one, args=(told, survived))
    launcher.start()
    while not (told.exists() and told.read_text()):
        time.sleep(0.01)
    late = psutil.Process(int(told.read_text()))
    launcher.kill()
    launcher.join()
    psutil.wait_procs([late], timeout=300)
    assert not late.is_running() and not survived.exists()


def work_and_wait(folder: Path, waits: Event) -> None:
    """A worker as torch's launcher starts it: after its work it waits."""
    os.environ["RANK"] = "0"
    worker.work_in_process(lambda options, resolved: None, RunOptions(), {}, folder)
    waits.set()
    while True:
        signal.pause()


@pytest.mark.parametrize(
    ("number", "signalled"), [("SIGUSR1", False), ("SIGUSR1", True), ("SIGTERM", False), ("SIGTERM", True)]
)
def test_worker_whose_work_is_done_ends_only_when_torch_says_so(
    number: str, signalled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's launcher waits without end for a process that a signal to the whole job ends between its work and its exit."""
    monkeypatch.setattr(worker, "DYING", 0.1)
    context = multiprocessing.get_context("fork")
    waits = context.Event()
    child = context.Process(target=work_and_wait, args=(tmp_path, waits))
    child.start()
    waits.wait()
    if signalled:
        (tmp_path / worker.SIGNALLED).touch()
    os.kill(child.pid or 0, signal.Signals[number])
    by_torch = number == "SIGTERM" and not signalled  # another process has failed
    child.join(300 if by_torch else 1)
    ended = child.exitcode
    child.kill()
    child.join()
    assert ended == (-signal.SIGTERM if by_torch else None)


def test_end_at_first_signal_during_interruption_is_ignored(killed: list[tuple[int, int]]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        try:
            raise Interrupted("by SIGTERM")
        except Interrupted:
            worker.end_at_first_signal(signal.SIGTERM, None)
        assert not killed and signal.getsignal(signal.SIGTERM) == before
        worker.end_at_first_signal(signal.SIGTERM, None)
        assert killed == [(os.getpid(), signal.SIGTERM)] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
