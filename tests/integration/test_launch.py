"""`launcher.nproc=N`: N real processes, torchrun's variables, one line for a user's mistake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from drafttrain.cli.launch import launch
from drafttrain.core.errors import UserError
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.targets.parallel import meeting
from drafttrain.train.interrupt import Interrupt
from tests import forked
from tests.standin.mooncake import free_port

HANG = 600  # seconds: longer than pytest lets a test be


def sums_ranks(options: RunOptions, resolved: dict[str, Any]) -> None:
    distributed.init_process_group("gloo")
    total = torch.tensor([float(distributed.get_rank() + 1)])
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    if options.name != "x" or resolved != {"a": 1} or total.item() != 3.0 or "OMP_NUM_THREADS" not in os.environ:
        raise AssertionError(f"{options.name} {resolved} {total}")


def complains_on_rank_1(options: RunOptions, resolved: dict[str, Any]) -> None:
    if os.environ["RANK"] == "1":
        raise UserError("one line; mend it")
    time.sleep(HANG)


def has_a_bug(options: RunOptions, resolved: dict[str, Any]) -> None:
    raise RuntimeError("a bug")


def is_killed(options: RunOptions, resolved: dict[str, Any]) -> None:
    if os.environ["RANK"] == "1":
        os.write(2, b"rank 1 runs out of memory\n")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG)


def is_killed_beside_one_that_heeds_signals(options: RunOptions, resolved: dict[str, Any]) -> None:
    """As `prepare` does: it ends at once, where training would have noticed that the other is gone."""
    start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    Path(options.output, f"{start}-{rank}").touch()
    with Interrupt():
        while start == "0" and not Path(options.output, "0-0").exists():
            time.sleep(0.01)
        if start == "0" and rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(HANG if start == "0" else 0)


def complains_beside_one_that_heeds_signals(options: RunOptions, resolved: dict[str, Any]) -> None:
    with Interrupt():
        complains_on_rank_1(options, resolved)


def is_signalled(options: RunOptions, resolved: dict[str, Any]) -> None:
    with Interrupt():
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(HANG)


def fails_twice(options: RunOptions, resolved: dict[str, Any]) -> None:
    start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    Path(options.output, f"{start}-{rank}-{options.resume}").touch()
    while start != "2" and len(list(Path(options.output).glob(f"{start}-*"))) < 2:
        time.sleep(0.01)
    if start != "2":
        raise RuntimeError("again")


def counts_the_world(options: RunOptions, resolved: dict[str, Any]) -> None:
    distributed.init_process_group("gloo")
    total = torch.ones(1)
    distributed.all_reduce(total)
    assert total.item() == 4.0
    Path(options.output, f"rank-{distributed.get_rank()}").touch()
    distributed.destroy_process_group()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OPTIONS = RunOptions(name="x", launcher=LauncherOptions(nproc=2))


def failed(work: Any, options: RunOptions, words: str) -> str:
    """What a launch said before its error, which has these words."""
    process = forked.start_launch(work, options, {})
    assert process.wait() == 1, process.said()
    said, _, error = process.said().rstrip("\n").rpartition("\n")
    assert words in error, process.said()
    return said


@pytest.mark.slow
def test_launch_two_processes_form_process_group() -> None:
    """Fresh ones; the other tests fork them."""
    launch(sums_ranks, OPTIONS, {"a": 1})


@pytest.mark.slow
def test_launch_user_error_on_one_rank_ends_all_ranks() -> None:
    assert failed(complains_on_rank_1, OPTIONS, "UserError: one line; mend it") == ""


@pytest.mark.slow
def test_launch_exception_on_rank_shows_one_traceback_and_keeps_logs(tmp_path: Path) -> None:
    said = failed(has_a_bug, replace(OPTIONS, output=str(tmp_path)), "ended with code 1")
    assert said.count("RuntimeError: a bug") == 1, "of the first to fail alone"
    (kept,) = tmp_path.glob("x/logs/*")
    assert f"output of all ranks: {kept}" in said
    assert any("RuntimeError: a bug" in log.read_text() for log in kept.glob("rank-*.log"))


@pytest.mark.slow
def test_launch_killed_rank_output_is_shown(tmp_path: Path) -> None:
    said = failed(is_killed, replace(OPTIONS, output=str(tmp_path)), "WorkerError: rank 1 ended with SIGKILL")
    assert "rank 1 runs out of memory" in said and "Traceback" not in said


@pytest.mark.slow
def test_launch_error_names_failed_rank_rather_than_terminated_ranks(tmp_path: Path) -> None:
    here = replace(OPTIONS, output=str(tmp_path))
    failed(is_killed_beside_one_that_heeds_signals, here, "WorkerError: rank 1 ended with SIGKILL")
    failed(complains_beside_one_that_heeds_signals, here, "UserError: one line; mend it")
    failed(is_signalled, here, "Interrupted: by SIGTERM")  # one that is told to end alone is no failure


@pytest.mark.slow
def test_launch_restart_after_killed_rank_restarts_all_ranks(tmp_path: Path) -> None:
    launcher = LauncherOptions(nproc=2, restarts=1)
    here = replace(OPTIONS, output=str(tmp_path), launcher=launcher)
    forked.launch(is_killed_beside_one_that_heeds_signals, here, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


@pytest.mark.slow
def test_torchrun_exit_with_open_process_group_keeps_exit_code(tmp_path: Path) -> None:
    ends = tmp_path / "ends.py"
    ends.write_text(
        "import sys, torch\n"
        "from drafttrain.targets.parallel import join\n"
        "part = join(2, torch.device('cpu'))\n"
        "for i in range(50):\n"
        "    part.share(i)\n"
        "sys.exit(2 if part.first else 0)\n"
    )
    done = subprocess.run([*TORCHRUN, str(ends)], capture_output=True, text=True, timeout=500)
    assert "exitcode  : 2 (" in done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.slow
def test_launch_restarts_pass_resume_auto_to_ranks(tmp_path: Path) -> None:
    again = replace(OPTIONS, output=str(tmp_path), launcher=LauncherOptions(nproc=2, restarts=2))
    forked.launch(fails_twice, again, {})
    starts = sorted(path.name for path in tmp_path.iterdir())
    assert starts == ["0-0-None", "0-1-None", "1-0-auto", "1-1-auto", "2-0-auto", "2-1-auto"]


@pytest.mark.slow
def test_launch_two_nodes_join_at_rendezvous(tmp_path: Path) -> None:
    launcher = LauncherOptions(nproc=2, nodes=2, rendezvous=f"localhost:{free_port()}")
    two = replace(OPTIONS, output=str(tmp_path), launcher=launcher)
    machines = [forked.start_launch(counts_the_world, two, {}) for _ in range(2)]
    assert [machine.wait() for machine in machines] == [0, 0], "\n".join(machine.said() for machine in machines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1", "rank-2", "rank-3"]


def test_launch_several_nodes_without_rendezvous_are_refused() -> None:
    with pytest.raises(UserError, match=r"rendezvous is None with launcher.nodes=2; set it to HOST:PORT"):
        launch(sums_ranks, RunOptions(launcher=LauncherOptions(nodes=2)), {})


def test_launch_nproc_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="under torchrun"):
        launch(sums_ranks, OPTIONS, {})


LEFT = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}  # by another launcher


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.grid)])
def test_fit_with_variables_of_another_launcher_names_them_and_ends_at_signal(number: signal.Signals, tmp_path: Path) -> None:
    """torch waits outside of Python for half an hour, where no handler of a signal runs."""
    variables = dict(os.environ) | LEFT | {"MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "drafttrain", "fit", "recipe=medusa"]
    process = forked.start(command, tmp_path, variables, {"drafttrain.targets.parallel.SILENT": 0.1})
    said = process.wait_for(r"waiting for 2 processes to meet at 127\.0\.0\.1:\d+, because the environment has (.*); if no")
    assert all(f"{name}={variables[name]}" in said[1] for name in (*LEFT, "MASTER_PORT"))
    os.kill(process.pid, number)
    assert process.wait() == (130 if number == signal.SIGINT else 75)
    assert f"interrupted by {number.name}, while it waited for other processes" in process.said()


def test_meeting_with_variables_that_are_not_whole_is_refused(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for changed, says in (
        ({"MASTER_PORT": None}, "the environment has RANK=1 .*, without MASTER_PORT; start with torchrun"),
        ({"RANK": "first"}, "where a number is expected"),
        ({"RANK": "2"}, "which is no rank of so many processes; .* env -u RANK -u WORLD_SIZE"),
    ):
        with subtests.test(changed=changed), monkeypatch.context() as patch:
            for name, value in (LEFT | {"MASTER_PORT": "1"} | changed).items():
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
            with pytest.raises(UserError, match=says), meeting():
                raise AssertionError("they must not wait")
