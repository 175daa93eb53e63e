"""Two machines with a cable between them: it is pulled, or the processes of one are killed, and the run goes on later."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.test_interrupt import lines_of
from tests.integration.test_training import arguments, digest, losses, once
from tests.slurm.cluster import wait_for
from tests.slurm.machines import Machine, Network, kill

pytestmark = pytest.mark.slurm
STEPS = ("recipe=medusa", "train.steps=60", "train.checkpoint_every=20", "train.hang_timeout=10")
PLACE = ("launcher.nodes=2", "launcher.rendezvous=first:29400", "resume=auto")


class Run:
    """The same command on both machines."""

    def __init__(self, network: Network, material: Path, output: Path, name: str, *more: str) -> None:
        command = arguments(material, output, *STEPS, *PLACE, *more)
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        self.files = [output / f"{name}-{machine.name}.txt" for machine in network.machines]
        output.mkdir(exist_ok=True)
        started = zip(network.machines, self.files, strict=True)
        self.processes = [machine.start(command, file, one_thread) for machine, file in started]

    def said(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in self.files)

    def wait(self, *which: int) -> list[int | None]:
        """The exit codes of these machines' commands."""
        wait_for(lambda: all(self.processes[i].poll() is not None for i in which), self.said)
        return [self.processes[i].returncode for i in which]


def resume(run: Run, network: Network, *which: int) -> None:
    """nsenter stops together with its child."""
    for i in which:
        for process in of_run(network.machines[i]):
            process.resume()
        run.processes[i].send_signal(signal.SIGCONT)


def of_run(machine: Machine) -> list[psutil.Process]:
    """The launcher there and its processes."""
    leaders = machine.processes("-m drafttrain fit")
    return [*leaders, *(child for leader in leaders for child in leader.children(recursive=True))]


def begun(run: Run, network: Network, output: Path) -> None:
    """Wait until it trains, and hold it there while the fault is made."""
    wait_for(lambda: lines_of(output) >= 25, run.said)
    for process in (process for machine in network.machines for process in of_run(machine)):
        process.suspend()
    assert lines_of(output) < 60, "the run has ended before the fault"


def resumed(network: Network, material: Path, output: Path) -> None:
    """Both machines go on to the weights of an undisturbed run."""
    run = Run(network, material, output, "again", "train.hang_timeout=120")
    assert run.wait(0, 1) == [0, 0], run.said()
    assert "resumed at step 20" in run.said()
    (done,) = (file.parent for file in output.glob("medusa/*/run.json"))
    whole = once(material, *STEPS, "launcher.nproc=2")
    assert digest(done) == digest(whole) and losses(done) == losses(whole)


def test_two_nodes_end_when_network_is_cut_and_run_resumes(two_machines: Network, material: Path, tmp_path: Path) -> None:
    output = tmp_path / "outputs"
    run = Run(two_machines, material, output, "first")
    begun(run, two_machines, output)
    two_machines.cut(two_machines.machines[1])
    resume(run, two_machines, 0, 1)
    assert run.wait(0, 1) == [1, 1], run.said()
    for file in run.files:
        text = file.read_text()
        assert "Traceback" not in text and "leaked" not in text, text
        assert "no step has ended for 10 seconds" in text or "the connection to the rendezvous first:29400 is lost" in text, (
            text
        )
    assert not [process for machine in two_machines.machines for process in of_run(machine)]
    two_machines.mend(two_machines.machines[1])
    resumed(two_machines, material, output)


@pytest.mark.sampled(killed=[0])
@pytest.mark.parametrize("killed", [0, 1])
def test_two_nodes_remaining_node_ends_when_other_is_killed(
    killed: int, two_machines: Network, material: Path, tmp_path: Path
) -> None:
    output = tmp_path / "outputs"
    run = Run(two_machines, material, output, "first")
    begun(run, two_machines, output)
    kill(of_run(two_machines.machines[killed]))
    other = 1 - killed
    resume(run, two_machines, other)
    assert run.wait(other) == [1], run.said()
    text = run.files[other].read_text()
    lost = (
        f"rank {other} has lost the connection to another process of the run",
        "the connection to the rendezvous first:29400 is lost",
    )
    assert any(f"drafttrain: {line}" in text for line in lost), text
    assert "Traceback" not in text, text
    if killed:  # the other way takes as long and does the same
        resumed(two_machines, material, output)
