"""`launcher=slurm`: submitted, interrupted before its time is up, queued again, finished; on two nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drafttrain.cli import slurm
from drafttrain.core.errors import UserError
from drafttrain.runs.options import LauncherOptions, SlurmOptions
from tests.integration.test_interrupt import checkpoints, lines_of
from tests.integration.test_training import arguments, losses, once
from tests.standin.mooncake import free_port

STEPS = ("recipe=medusa", "train.steps=40", "train.checkpoint_every=20")


@pytest.fixture
def cluster(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Slurm's commands, first on PATH; it also holds what they remember."""
    pytest.importorskip("submitit")
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {root}/tests/integration/slurm_commands.py {name} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_PLACE", str(folder))
    return folder


def wait_for(happened: Callable[[], bool], output: Path) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        said = [log.read_text() for log in output.glob("slurm/*.out")]
        assert time.monotonic() < deadline, "\n".join(said)
        time.sleep(0.05)


def finished(output: Path) -> bool:
    runs = list(output.glob("medusa/*/run.json"))
    return bool(runs) and json.loads(runs[0].read_text())["finished"]


@pytest.mark.slow
@pytest.mark.grid  # tests/slurm has the same with Slurm's own daemons
def test_slurm_launcher_job_saves_on_usr1_and_is_requeued(cluster: Path, material: Path, tmp_path: Path) -> None:
    output, port = tmp_path / "outputs", free_port()
    asked = ("launcher=slurm", "launcher.nproc=1", "launcher.nodes=2", "launcher.slurm.partition=long")
    where = (f"launcher.slurm.folder={output / 'slurm'}", f"launcher.slurm.port={port}", "launcher.slurm.gpus_per_node=0")
    command = arguments(material, output, *STEPS, *asked, *where)
    submitted = subprocess.run(command, capture_output=True, text=True, check=True)
    assert submitted.stdout.startswith("job 7: output in ")
    script = Path((cluster / "script").read_text()).read_text()
    for line in ("--nodes=2", "--ntasks-per-node=1", "--partition=long", "--time=60", "--signal=USR1@120", "--requeue"):
        assert f"#SBATCH {line}\n" in script
    wait_for(lambda: lines_of(output) >= 3, output)
    for task in json.loads((cluster / "tasks").read_text()):
        os.killpg(task, signal.SIGUSR1)
    wait_for(lambda: finished(output), output)
    (run,) = output.glob("medusa/*/run.json")
    whole = once(material, *STEPS)
    assert losses(run.parent) == pytest.approx(losses(whole), rel=1e-5)
    assert checkpoints(output) == checkpoints(whole.parents[1])
    assert any("resumed at step" in log.read_text() for log in output.glob("slurm/*.out"))


def test_slurm_launcher_unsupported_command_is_refused() -> None:
    with pytest.raises(UserError, match="runs fit, measure, auto, not generate"):
        slurm.submit("generate", [])


def test_slurm_launcher_auto_that_would_ask_is_refused() -> None:
    with pytest.raises(UserError, match="cannot ask before it starts; add --yes"):
        slurm.submit("auto", [slurm.SlurmRequest([], LauncherOptions(nodes=2))])


def test_slurm_launcher_auto_on_several_nodes_submits_plan_array_and_last_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    scripts = {"srun": "", "sbatch": f'cp "$1" {tmp_path}/$(ls {tmp_path}/*.sent | wc -l).sent\necho "Submitted batch job 7"\n'}
    for name, content in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{content}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = SlurmOptions(folder=str(tmp_path / "slurm"), gpus_per_node=8, extra={"constraint": "h100"})
    request = slurm.SlurmRequest(["auto.yes=true"], LauncherOptions(nodes=3, slurm=options))
    assert slurm.submit("auto", [request]) == ["7", "7_0", "7_1", "7_2", "7"]
    plan, race, last = (path.read_text() for path in sorted(tmp_path.glob("*.sent")))
    assert all("--nodes=1\n" in script and "--constraint=h100\n" in script for script in (plan, race, last))
    assert "--array" not in plan + last and "--array=0-2" in race and "--dependency" not in plan
    assert "--dependency=afterok:7\n" in race and "--dependency=afterok:7,afterany:7\n" in last


def test_slurm_launcher_without_srun_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r'^launcher=slurm: Could not detect "srun".*; submit on the cluster'):
        slurm.submit("fit", [slurm.SlurmRequest([], LauncherOptions())])
    assert not list(tmp_path.iterdir())


def test_slurm_launcher_without_submitit_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"needs submitit; pip install 'drafttrain\[slurm\]'"):
        slurm.submit("fit", [slurm.SlurmRequest([], LauncherOptions())])


class Ended:
    """A process that has ended with `code`; `commands` has what was started."""

    commands: list[list[str]] = []  # noqa: RUF012
    code = 0

    def __init__(self, command: list[str]) -> None:
        self.commands.append(command)

    def wait(self) -> int:
        return self.code


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The environment of a job of an array on its first node, and a `scontrol` that notes what it is asked in this file."""
    pytest.importorskip("submitit")
    asked = tmp_path / "asked"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\necho "JobId=9 JobState=$STATE Restarts=0"\n')
    scontrol.chmod(0o755)
    variables = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"}
    nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_PROCID": "0"}
    for name, value in (variables | nodes | {"STATE": "RUNNING", "PATH": f"{tmp_path}:{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    start = subprocess.Popen
    monkeypatch.setattr(
        slurm.subprocess, "Popen", lambda words, **more: Ended(words) if "-m" in words else start(words, **more)
    )
    monkeypatch.setattr(Ended, "commands", [])
    return asked


def test_slurm_jobs_on_same_node_use_distinct_rendezvous_ports(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in ("9", "10"):
        monkeypatch.setenv("SLURM_JOB_ID", number)
        slurm.SlurmJob(["fit"], 1, 0, None)()
    assert [command[-1] for command in Ended.commands] == ["launcher.rendezvous=node1:15009", "launcher.rendezvous=node1:15010"]
    slurm.SlurmJob(["auto", "auto.yes=true"], 1, 0, None)()
    assert Ended.commands.pop()[-3:] == ["launcher=local", "launcher.restarts=0", "launcher.nproc=auto"]
    slurm.SlurmJob(["fit"], 1, 0, 29400)()
    assert Ended.commands[-1][-1] == "launcher.rendezvous=node1:29400"


def test_slurm_job_interrupted_is_requeued_unless_cancelled(
    job: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for code, state, node, again in (
        (75, "RUNNING", 0, True),  # preempted with a time of grace
        (-signal.SIGTERM, "RUNNING", 0, True),  # before Python could handle the signal
        (75, "RUNNING", 1, False),  # the first node does it
        (75, "CANCELLED", 0, False),  # scancel
        (75, "PENDING", 0, False),  # preempted without, Slurm has done it
        (0, "RUNNING", 0, False),
    ):
        job.unlink(missing_ok=True)
        monkeypatch.setattr(Ended, "code", code)
        monkeypatch.setenv("STATE", state)
        monkeypatch.setenv("SLURM_PROCID", str(node))
        with subtests.test(code=code, state=state, node=node):
            assert slurm.SlurmJob(["fit"], 1, 0, None)() == ("done" if code == 0 else "interrupted")
            # not "requeue 9", which is the whole array
            assert ("requeue 9_1" in (job.read_text().splitlines() if job.exists() else [])) is again
