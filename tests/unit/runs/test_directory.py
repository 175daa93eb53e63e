"""A run's directory: it appears whole, and going on removes what a killed process left in it."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafttrain.core.files import HOST
from drafttrain.runs import directory as rundir
from drafttrain.runs.directory import RunDirectory
from drafttrain.runs.options import RunOptions


class Alone:
    first = True

    def share(self, value: Any) -> Any:
        return value


def opened(output: Path) -> RunDirectory:
    options = RunOptions(output=str(output), name="medusa", resume="auto")
    return RunDirectory.open(options, {"name": "medusa"}, Alone(), print)  # type: ignore[arg-type]


def ended_process() -> int:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_run_directory_resume_removes_files_of_killed_process(tmp_path: Path) -> None:
    """Killed while it removed an old checkpoint, after its last step: nothing is saved and pruned any more."""
    run, left = opened(tmp_path), f"tmp-{HOST}-{ended_process()}"
    (run.path / "checkpoints" / f"step-00002.{left}").mkdir()
    (run.path / f"run.json.{left}").touch()
    again = opened(tmp_path)
    assert again.path == run.path
    assert not list(again.path.rglob("*.tmp-*"))


def test_run_directory_failed_creation_leaves_no_partial_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its run.json nothing could go on with it."""
    with monkeypatch.context() as patched:
        patched.setattr(rundir, "environment", lambda device: [][1])
        with pytest.raises(IndexError):
            opened(tmp_path)
    assert not list((tmp_path / "medusa").iterdir())
    (tmp_path / "medusa" / f"2026-01-01_00-00-00.tmp-{HOST}-{ended_process()}").mkdir()
    run = opened(tmp_path)
    assert [path.name for path in (tmp_path / "medusa").iterdir()] == [run.path.name]
    assert json.loads((run.path / "run.json").read_text())["finished"] is False


def test_run_directories_of_same_second_are_one_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tasks of a sweep begin, on machines that share a file system."""
    monkeypatch.setattr(rundir, "dated_path", lambda output, name: Path(output) / name / "now")
    monkeypatch.setattr(rundir, "environment", lambda device: {})
    processes = multiprocessing.get_context("fork")
    together, found = processes.Barrier(16), processes.Queue()

    def begin(number: int) -> None:
        options = RunOptions(output=str(tmp_path), name="medusa")
        together.wait()
        found.put((number, RunDirectory.open(options, {"train": {"lr": number}}, Alone(), print).path))  # type: ignore[arg-type]

    started = [processes.Process(target=begin, args=(number,)) for number in range(16)]
    for process in started:
        process.start()
    paths = dict(found.get() for _ in started)
    for process in started:
        process.join()
    assert len(set(paths.values())) == 16 == len(list((tmp_path / "medusa").iterdir()))
    for number, path in paths.items():
        assert yaml.safe_load((path / "config.yaml").read_text())["train"]["lr"] == number
