"""`features.nodes` under Slurm: one node runs servers of states, the other trains. A stand-in is in place of vLLM."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.integration.test_interrupt import lines_of
from tests.integration.test_started_servers import started
from tests.integration.test_training import digest, losses, once
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.machines import kill
from tests.slurm.test_slurm import ended, preempt, processes, restarted, run_of, said, submitted

pytestmark = pytest.mark.slurm
STEPS = ("train.steps=100", "train.checkpoint_every=50")
NODES = ("launcher.nodes=2", "features.nodes=1")


def begun(cluster: Cluster, material: Path, output: Path, *more: str) -> str:
    """The number of a job that trains."""
    job = submitted(cluster, material, output, *started(output, output / "states"), *STEPS, *NODES, *more)
    wait_for(lambda: lines_of(output) >= 3, lambda: said(output))
    return job


def on(cluster: Cluster, node: int, word: str, output: Path) -> list[psutil.Process]:
    return cluster.network.machines[node].processes(word, str(output))


def as_on_one_machine(material: Path, output: Path, folder: Path) -> None:
    folder.mkdir()
    run, whole = run_of(output), once(material, *started(folder, folder / "states"), *STEPS)
    assert digest(run) == digest(whole) and losses(run) == losses(whole)


def test_slurm_killed_server_and_step_restart_and_nodes_are_freed(cluster: Cluster, material: Path, tmp_path: Path) -> None:
    job = begun(cluster, material, tmp_path)
    (server,) = on(cluster, 1, "tests.standin.vllm", tmp_path)
    assert not on(cluster, 0, "tests.standin.vllm", tmp_path) and not on(cluster, 1, "resource_tracker", tmp_path)
    server.kill()
    wait_for(lambda: "it starts again" in said(tmp_path), lambda: said(tmp_path))
    wait_for(lambda: bool(on(cluster, 1, "tests.standin.vllm", tmp_path)), lambda: said(tmp_path))
    kill(on(cluster, 1, "launcher.role=server", tmp_path))
    assert lines_of(tmp_path) < 100, "the run has ended before the kill"
    assert ended(cluster, job, tmp_path) == "COMPLETED", said(tmp_path)
    assert said(tmp_path).count("features: this machine runs servers at 10.0.0.3") == 2, said(tmp_path)
    wait_for(cluster.idle, cluster.said)
    assert not on(cluster, 1, "python", tmp_path) and not list((tmp_path / "states").iterdir())
    as_on_one_machine(material, tmp_path, tmp_path / "one")
    assert "Traceback" not in said(tmp_path), said(tmp_path)


@pytest.mark.parametrize("way", ["preempted", pytest.param("before the time limit", marks=pytest.mark.grid)])
def test_slurm_servers_run_until_interrupted_trainers_have_saved(
    way: str, cluster: Cluster, material: Path, tmp_path: Path
) -> None:
    job = begun(cluster, material, tmp_path, "launcher.slurm.partition=grace")
    if way == "preempted":
        preempt(cluster)
    else:
        cluster.run("scancel", "--signal=USR1", job)
    restarted(cluster, job, tmp_path)
    assert ended(cluster, job, tmp_path) == "COMPLETED", said(tmp_path)
    assert "is saved; resume=auto continues the run" in said(tmp_path)
    (step,) = re.findall(r"resumed at step (\d+)", said(tmp_path))
    assert int(step) not in (0, 50), "it did not save when it was told to end"
    as_on_one_machine(material, tmp_path, tmp_path / "one")


@pytest.mark.sampled(node=[1])
@pytest.mark.parametrize("node", [0, 1], ids=["of trainers", "of servers"])
def test_slurm_job_with_server_node_requeues_and_resumes_after_node_loss(
    node: int, cluster: Cluster, material: Path, tmp_path: Path
) -> None:
    job = begun(cluster, material, tmp_path, "train.checkpoint_every=20")
    wait_for(lambda: bool(list(tmp_path.glob("*/*/checkpoints/step-*20"))), lambda: said(tmp_path))
    for process in processes(cluster, tmp_path):
        process.suspend()
    assert lines_of(tmp_path) < 100, "the run has ended before the node is lost"
    cluster.lose(node)
    restarted(cluster, job, tmp_path)
    cluster.find(node)
    assert ended(cluster, job, tmp_path) == "COMPLETED", said(tmp_path)
    assert cluster.job(job)["Restarts"] == "1" and "resumed at step" in said(tmp_path), said(tmp_path)
    wait_for(cluster.idle, cluster.said)
    assert not on(cluster, 1, "python", tmp_path) and not list((tmp_path / "states").iterdir())
    as_on_one_machine(material, tmp_path, tmp_path / "one")


def test_slurm_servers_that_cannot_start_fail_job(cluster: Cluster, material: Path, tmp_path: Path) -> None:
    job = submitted(cluster, material, tmp_path, *started(tmp_path, tmp_path / "states"), *NODES, "features.gpus=64")
    assert ended(cluster, job, tmp_path) == "FAILED", said(tmp_path)
    assert len(re.findall("drafttrain: .*the servers need 64 GPUs", said(tmp_path))) == 2, said(tmp_path)
