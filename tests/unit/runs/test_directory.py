"""A run's directory: it appears whole, and going on removes what a killed process left in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafttrain.core.errors import UserError
from drafttrain.core.files import HOST
from drafttrain.runs import directory as rundir
from drafttrain.runs.directory import RunDirectory
from drafttrain.runs.options import RunOptions
from drafttrain.train import TrainOptions
from tests.helpers import at_once


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
    (run.path / "checkpoints" / "step-00004").mkdir()
    (run.path / "checkpoints" / "step-00004" / f"golden.safetensors.{left}").touch()
    again = opened(tmp_path)
    assert again.path == run.path
    assert not list(again.path.rglob("*.tmp-*"))


def asked(output: Path, resume: str, steps: int, said: list[str], lr: float = 1e-3) -> RunDirectory:
    """The directory of a run of so many steps, at a constant rate."""
    train = TrainOptions(steps=steps, lr=lr, schedule="constant", warmup=0.25)
    options = RunOptions(output=str(output), name="medusa", resume=resume, train=train)
    resolved = {"name": "medusa", "train": {"steps": steps, "lr": lr}}
    return RunDirectory.open(options, resolved, Alone(), said.append)  # type: ignore[arg-type]


def trained(run: RunDirectory, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the run had made its steps and had finished."""
    monkeypatch.setattr(rundir, "newest_valid", lambda folder, say: folder / f"step-{steps:05d}")
    run.finish()


def test_run_directory_finished_run_becomes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    run = asked(tmp_path, "auto", 8, said)
    assert len(said) == 1 and f"resume=auto: {tmp_path}/medusa has no unfinished run of these settings, so a new one" in said[0]
    trained(run, 8, monkeypatch)
    longer = asked(tmp_path, str(run.path), 16, said)
    assert longer == RunDirectory(run.path, run.path / "checkpoints" / "step-00008", 8)
    assert "lengthened from 8 to 16 steps; train.schedule=constant: the rate was 1.0e-03 at step 8 and goes on with" in said[1]
    assert yaml.safe_load((run.path / "config.yaml").read_text())["train"]["steps"] == 16
    assert asked(tmp_path, "auto", 16, said) == longer and len(said) == 2, "interrupted, it goes on as a run of 16 steps"
    (run.path / "config.yaml").unlink()  # killed before it was written anew
    trained(longer, 16, monkeypatch)
    assert asked(tmp_path, str(run.path), 32, said).first_steps == 8 and "from 16 to 32" in said[2]


def test_run_directory_resume_says_what_it_does_beside_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    run = asked(tmp_path, "auto", 8, said)
    trained(run, 8, monkeypatch)
    assert asked(tmp_path, "auto", 16, said).path != run.path
    assert f"so a new one begins; {run.path} has finished, resume={run.path} train.steps=N makes it longer" in said[-1]
    assert asked(tmp_path, str(run.path), 8, said).path == run.path and "has all of its 8 steps" in said[-1]
    for steps, lr, why in ((4, 1e-3, "a run of 8 steps, which can only become longer"), (16, 2e-3, "of another configuration")):
        with pytest.raises(UserError, match=why):
            asked(tmp_path, str(run.path), steps, said, lr)
    assert json.loads((run.path / "run.json").read_text())["finished"]


def test_run_directory_of_older_version_goes_on_where_new_settings_have_their_defaults(tmp_path: Path) -> None:
    said = list[str]()
    run = asked(tmp_path, "auto", 8, said)
    old = {"name": "medusa", "train": {"steps": 8, "lr": 1e-3, "gone": True}, "features": {"law": "top_k"}}
    (run.path / "config.yaml").write_text(yaml.safe_dump(old))
    (run.path / "run.json").write_text(json.dumps({"config_hash": "of other settings", "finished": False}))
    train = TrainOptions(steps=8, lr=1e-3)
    for seed, same in ((train.seed, True), (train.seed + 1, False)):
        options = RunOptions(output=str(tmp_path), name="medusa", resume="auto", train=train)
        resolved: dict[str, Any] = {"name": "medusa", "train": {"steps": 8, "lr": 1e-3, "seed": seed}}
        resolved["features"] = {"distribution": "top_k"}  # it was renamed
        found = RunDirectory.open(options, resolved, Alone(), said.append)  # type: ignore[arg-type]
        assert (found.path == run.path) == same
    assert f"no unfinished run of these settings (of {run.path}, train.seed was 0, is 1), so a new one begins" in said[-1]
    with pytest.raises(UserError, match=r"another configuration: train\.lr was 0\.001, is 0\.002; repeat"):
        asked(tmp_path, str(run.path), 8, said, 2e-3)


def test_run_directory_of_run_without_a_bias_is_another_one_than_with_it(tmp_path: Path) -> None:
    paths = {}
    for bias in ({}, {9: 1.0, 13: -5.0}):
        options = RunOptions(output=str(tmp_path), name="medusa", resume="auto")
        resolved = {"name": "medusa", "decode": {"logit_bias": bias}}
        paths[len(bias)] = {RunDirectory.open(options, resolved, Alone(), print).path for _ in range(2)}  # type: ignore[arg-type]
    assert len(paths[0]) == len(paths[2]) == 1 and paths[0] != paths[2]


def test_run_directory_whose_record_is_of_no_run_is_none(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """As a damaged or an exchanged file may be."""
    run, said = opened(tmp_path), list[str]()
    state = json.loads((run.path / "run.json").read_text())
    without = [{k: v for k, v in state.items() if k != name} for name in state]
    for content in ([], None, 3, {"family": "medusa"}, *without, state | {"finished": "no"}, state | {"steps": "x"}):
        (run.path / "run.json").write_text(json.dumps(content))
        with subtests.test(content=content):
            assert opened(tmp_path).path != run.path
            with pytest.raises(UserError, match="which is not a run directory"):
                asked(tmp_path, str(run.path), 8, said)


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

    def begin(number: int) -> Path:
        options = RunOptions(output=str(tmp_path), name="medusa")
        return RunDirectory.open(options, {"train": {"lr": number}}, Alone(), print).path  # type: ignore[arg-type]

    paths = at_once(16, begin)
    assert len(set(paths)) == 16 == len(list((tmp_path / "medusa").iterdir()))
    for number, path in enumerate(paths):
        assert yaml.safe_load((path / "config.yaml").read_text())["train"]["lr"] == number
