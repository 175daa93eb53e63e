"""`launcher=slurm` and `scripts/slurm/fit.sbatch` on Slurm's own daemons: preemption, time limits, arrays, failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.test_auto import WORDS as AUTO
from tests.integration.test_interrupt import lines_of
from tests.integration.test_training import arguments, digest, losses, once
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.machines import Machine

pytestmark = pytest.mark.slurm
STEPS = ("recipe=medusa", "train.steps=60", "train.checkpoint_every=20")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")


def submit(cluster: Cluster, material: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`drafttrain fit launcher=slurm` on the controller. more: the last words win."""
    slurm = (
        "launcher=slurm",
        "launcher.nproc=1",
        "launcher.slurm.gpus_per_node=0",
        f"launcher.slurm.folder={output / 'slurm'}",
    )
    command = arguments(material, output, *STEPS, *slurm, *more)
    return cluster.controller.run(*command, check=False, env=cluster.environment)


def submitted(cluster: Cluster, material: Path, output: Path, *more: str) -> str:
    """The number of the one job."""
    done = submit(cluster, material, output, *more)
    found = re.fullmatch(r"job (\d+): output in (\S+)_log.out(, a file for each node)?\n", done.stdout)
    assert found and not done.returncode, done.stdout + done.stderr
    return found[1]


def tracebacks(tmp_path: Path) -> int:
    """How many the logs hold, but for submitit's where Slurm ends its `scontrol requeue` together with the job."""
    text = said(tmp_path)
    return text.count("Traceback (most recent call last)") - text.count("'requeue', '")


def said(output: Path) -> str:
    """All output of the jobs."""
    return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in sorted(output.glob("slurm/*.out")))


def processes(cluster: Cluster, output: Path) -> list[psutil.Process]:
    """The processes of the run with this output, without the job's own."""
    leaders = [p for node in cluster.network.machines for p in node.processes("-m drafttrain fit", f"output={output}")]
    return [*leaders, *(child for leader in leaders for child in leader.children(recursive=True))]


def frozen(cluster: Cluster, output: Path) -> list[psutil.Process]:
    """The processes of a run that has begun to train. They are stopped, so that it does not end before Slurm has acted."""
    wait_for(lambda: lines_of(output) >= 3, lambda: said(output))
    found = processes(cluster, output)
    for process in found:
        process.suspend()
    assert lines_of(output) < 60, "the run has ended before it could be stopped"
    return found


def ended(cluster: Cluster, job: str, output: Path) -> str:
    """The state in which the job ends."""
    wait_for(lambda: cluster.state(job) in ENDED, lambda: f"{cluster.job(job)}\n{said(output)}")
    return cluster.state(job)


def restarted(cluster: Cluster, job: str, output: Path) -> None:
    wait_for(lambda: cluster.job(job).get("Restarts") == "1", lambda: f"{cluster.job(job)}\n{said(output)}")


def run_of(output: Path) -> Path:
    (run,) = output.glob("medusa/*/run.json")
    return run.parent


def preempt(cluster: Cluster) -> None:
    """Submit a job of a higher priority that needs both nodes."""
    cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=srun true")


def test_slurm_submit_to_unknown_partition_is_refused_in_one_line(cluster: Cluster, material: Path, tmp_path: Path) -> None:
    done = submit(cluster, material, tmp_path, "launcher.slurm.partition=nowhere")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("drafttrain: launcher=slurm: ")
    assert "invalid partition specified: nowhere" in done.stderr and "Traceback" not in done.stderr


def test_slurm_preempted_job_requeues_and_resumes_to_same_weights(cluster: Cluster, material: Path, tmp_path: Path) -> None:
    gpus = "launcher.slurm.gpus_per_node=null"  # as many as processes
    job = submitted(cluster, material, tmp_path, "launcher.nproc=2", gpus)
    frozen(cluster, tmp_path)
    preempt(cluster)
    restarted(cluster, job, tmp_path)
    assert ended(cluster, job, tmp_path) == "COMPLETED", said(tmp_path)
    whole = once(material, *STEPS, "launcher.nproc=2")
    run = run_of(tmp_path)
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
    assert "resumed at step" in said(tmp_path) and not tracebacks(tmp_path), said(tmp_path)


@pytest.mark.parametrize("way", ["launcher", "script"])
def test_slurm_job_saving_in_grace_time_is_requeued_and_resumes(
    way: str, cluster: Cluster, material: Path, root: Path, tmp_path: Path
) -> None:
    if way == "launcher":
        job = submitted(cluster, material, tmp_path, "launcher.slurm.partition=grace")
    else:
        (tmp_path / "slurm").mkdir()
        environment = cluster.environment | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GPUS_PER_NODE": "1",
        }
        options = ("--partition=grace", "--nodes=1", "--parsable", f"--output={tmp_path / 'slurm' / 'script.out'}")
        words = arguments(material, tmp_path, *STEPS)[4:]
        job = cluster.controller.run("sbatch", *options, root / "scripts/slurm/fit.sbatch", *words, env=environment).stdout
        job = job.strip()
    frozen(cluster, tmp_path)
    preempt(cluster)
    restarted(cluster, job, tmp_path)
    assert ended(cluster, job, tmp_path) == "COMPLETED", said(tmp_path)
    run, whole = run_of(tmp_path), once(material, *STEPS)
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
    assert "is saved; resume=auto continues the run" in said(tmp_path) and "resumed at step" in said(tmp_path)


def test_slurm_two_node_job_saves_before_time_limit_and_resumes(cluster: Cluster, material: Path, tmp_path: Path) -> None:
    job = submitted(cluster, material, tmp_path, "launcher.nodes=2", "launcher.slurm.save_before=20")
    stopped = frozen(cluster, tmp_path)
    hours, minutes, seconds = map(int, cluster.job(job)["RunTime"].split(":"))
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={hours * 60 + minutes + (2 if seconds > 30 else 1)}")
    wait_for(lambda: "Caught signal SIGUSR1" in said(tmp_path), lambda: said(tmp_path))
    for process in stopped:
        process.resume()
    restarted(cluster, job, tmp_path)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert ended(cluster, job, tmp_path) == "COMPLETED", said(tmp_path)
    run, whole = run_of(tmp_path), once(material, *STEPS, "launcher.nproc=2")
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
    assert "is saved; resume=auto continues the run" in said(tmp_path) and "resumed at step" in said(tmp_path)
    assert not tracebacks(tmp_path), said(tmp_path)


def test_slurm_cancelled_job_saves_and_is_not_requeued(cluster: Cluster, material: Path, tmp_path: Path) -> None:
    job = submitted(cluster, material, tmp_path)
    stopped = frozen(cluster, tmp_path)
    cluster.run("scancel", job)
    for process in stopped:
        process.resume()
    wait_for(lambda: not processes(cluster, tmp_path), lambda: said(tmp_path))
    assert "is saved; resume=auto continues the run" in said(tmp_path)
    wait_for(lambda: cluster.job(job).get("JobState") == "CANCELLED", lambda: str(cluster.job(job)))
    assert cluster.job(job)["Restarts"] == "0"


def test_slurm_sweep_is_submitted_as_one_job_array(cluster: Cluster, material: Path, tmp_path: Path) -> None:
    done = submit(cluster, material, tmp_path, "train.lr=1e-3,2e-3", "-m", "launcher.slurm.cpus_per_task=2")
    lines = [re.fullmatch(r"job ((\d+)_\d) \((.*)\): output in (\S+)", line) for line in done.stdout.splitlines()]
    assert not done.returncode and all(lines), done.stdout + done.stderr
    found = [line for line in lines if line is not None]
    assert len(found) == 2 and found[0][2] == found[1][2], "not one array"
    assert [line[3] for line in found] == ["train.lr=0.001", "train.lr=0.002"]
    (script,) = tmp_path.glob("slurm/*submission.sh")
    assert re.search(r"^srun .*--cpus-per-task=2", script.read_text(), re.MULTILINE)
    for line in found:
        assert ended(cluster, line[1], tmp_path) == "COMPLETED", said(tmp_path)
    rates = sorted(
        re.findall(r"^ +lr: (.+)$", file.read_text(), re.MULTILINE)[0] for file in tmp_path.glob("medusa/*/config.yaml")
    )
    assert rates == ["0.001", "0.002"]


@pytest.mark.grid  # minutes; the submission and the shares of a race have tests of their own
@pytest.mark.timeout(1200)
def test_slurm_auto_on_two_nodes_races_as_an_array_and_decides_in_a_last_job(cluster: Cluster, tmp_path: Path) -> None:
    slurm = (
        "launcher=slurm",
        "launcher.nodes=2",
        "launcher.slurm.gpus_per_node=0",
        f"launcher.slurm.folder={tmp_path / 'slurm'}",
    )
    command = [sys.executable, "-m", "drafttrain", "auto", "--yes", f"output={tmp_path}", *slurm, *AUTO]
    one_thread = cluster.environment | {"OMP_NUM_THREADS": "1"}  # the nodes share this machine's cores
    done = cluster.controller.run(*command, check=False, env=one_thread)
    jobs = re.findall(r"^job (\d+(?:_\d)?)", done.stdout, re.MULTILINE)
    assert not done.returncode and [job.partition("_")[2] for job in jobs] == ["", "0", "1", ""], done.stdout + done.stderr
    assert "afterok" in cluster.job(jobs[1])["Dependency"] and "afterany" in cluster.job(jobs[3])["Dependency"]
    assert [ended(cluster, job, tmp_path) for job in jobs] == ["COMPLETED"] * 4, said(tmp_path)
    (folder,) = tmp_path.glob("auto/*")
    decision = json.loads((folder / "auto.json").read_text())
    raced = {each["name"]: each["points"] for each in decision["candidates"]}
    assert set(raced) == {"medusa", "medusa-2"} and all(len(points) == 1 for points in raced.values()), said(tmp_path)
    nodes = [(tmp_path / "slurm" / f"{job}_0_log.out").read_text() for job in jobs]
    assert "round 1: medusa, " in nodes[1] and "round 1: medusa-2, " in nodes[2], said(tmp_path)
    assert not any(" steps, predicted " in nodes[i] for i in (0, 3)) and "# Serve" in nodes[3], said(tmp_path)


def test_slurm_failed_rank_traceback_is_in_named_log(cluster: Cluster, material: Path, root: Path, tmp_path: Path) -> None:
    node = cluster.network.machines[1]
    file = root / "drafttrain" / "train" / "optimizer.py"
    damaged = tmp_path / "optimizer.py"
    damaged.write_text(file.read_text() + "\n\ndef learning_rate(*_):\n    raise RuntimeError('planted fault')\n")
    with_fault(node, damaged, file)
    try:
        job = submitted(cluster, material, tmp_path, "launcher.nodes=2")
        assert ended(cluster, job, tmp_path) == "FAILED"
    finally:
        node.run("umount", file)
    first, second = ((tmp_path / "slurm" / f"{job}_{node}_log.out").read_text() for node in (0, 1))
    assert "RuntimeError: planted fault" in second and "drafttrain: rank 1 ended with code 1" in second
    assert "rank 0 has lost the connection to another process of the run" in first
    assert "the output of the other ranks and machines says why" in first and "gloo" not in first
    kept = re.search(r"output of all ranks: (\S+)", second)
    assert kept and "planted fault" in (Path(kept[1]) / "rank-1.log").read_text()


def with_fault(node: Machine, damaged: Path, file: Path) -> None:
    """On this machine alone the file has other content."""
    node.run("mount", "--bind", damaged, file)
