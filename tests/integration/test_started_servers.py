"""Servers of states that the run starts, several here or on another machine, with a stand-in in place of vLLM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.integration.test_engine_features import STEPS, free_port
from tests.integration.test_interrupt import lines_of
from tests.integration.test_training import arguments, digest, fit, losses
from tests.standin.vllm import python


def wait_for(happened: Callable[[], object], said: Callable[[], str]) -> None:
    until = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < until, said()
        time.sleep(0.05)


def servers(folder: Path) -> list[psutil.Process]:
    """The processes of servers that write into a folder below this one."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "tests.standin.vllm" in line and str(folder) in line:
            found.append(process)
    return found


def started(folder: Path, states: Path, *more: str) -> tuple[str, ...]:
    """Options of a run that starts its servers. folder: for the "Python" with vLLM."""
    own = (f"features.python={python(folder)}", f"features.dir={states}")
    return (*STEPS, "features=engine", "data.max_length=64", "train.micro_batch=1", *own, *more)


@pytest.mark.slow
def test_one_of_two_servers_is_killed_and_starts_again(material: Path, tmp_path: Path) -> None:
    states, steps = tmp_path / "states", ("train.steps=150", "train.checkpoint_every=150")
    trainer = forked.start(arguments(material, tmp_path / "two", *started(tmp_path, states, "features.count=2", *steps)))
    wait_for(lambda: lines_of(tmp_path / "two") >= 3, trainer.said)
    first, second = servers(states)
    first.kill()
    wait_for(lambda: "it starts again" in trainer.said(), trainer.said)
    assert lines_of(tmp_path / "two") < 150, "the run has ended before the kill"
    assert trainer.wait() == 0, trainer.said()
    assert "features: starting vLLM, which takes a minute or more: 2 servers; 1 process trains on the" in trainer.said()
    assert "2 of 2 servers (vllm 0.32.0) give the target's states" in trainer.said()
    assert not servers(states) and not list(states.iterdir())
    run = next((tmp_path / "two").glob("*/*/run.json")).parent
    whole = fit(material, tmp_path / "one", *started(tmp_path, states, *steps))
    assert digest(run) == digest(whole) and losses(run) == losses(whole)


@pytest.mark.slow
def test_each_of_two_machines_that_train_has_a_server_of_its_own(material: Path, tmp_path: Path) -> None:
    states, place = tmp_path / "states", ("launcher.nodes=2", f"launcher.rendezvous=localhost:{free_port()}")
    words = arguments(material, tmp_path / "two", *started(tmp_path, states, *place))
    both = [forked.start(words) for _ in range(2)]
    most = 0

    def ended() -> bool:
        nonlocal most
        most = max(most, len(servers(states)))
        return all(process.poll() is not None for process in both)

    wait_for(ended, both[0].said)
    assert [process.returncode for process in both] == [0, 0], both[0].said()
    assert most == 2 and not list(states.iterdir())
    run = next((tmp_path / "two").glob("*/*/run.json")).parent
    whole = fit(material, tmp_path / "one", *started(tmp_path, states, "launcher.nproc=2"))
    assert digest(run) == digest(whole) and losses(run) == losses(whole)


class TwoMachines:
    """A machine of servers and one of trainers, as two commands here."""

    def __init__(self, material: Path, folder: Path, *more: str) -> None:
        self.output, self.states = folder / "outputs", folder / "states"
        place = ("launcher.nodes=2", f"launcher.rendezvous=127.0.0.1:{free_port()}", "features.nodes=1")
        self.words = arguments(material, self.output, *started(folder, self.states, *place, *more))
        self.server = forked.start([*self.words, "launcher.role=server"])
        self.trainer = self.trains()

    def trains(self, *more: str) -> forked.Forked:
        return forked.start([*self.words, *more])

    def said(self) -> str:
        return f"== servers\n{self.server.said()}\n== trainers\n{self.trainer.said()}"

    def end(self) -> None:
        for process in (self.server, self.trainer):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.slow
def test_trainers_that_are_killed_go_on_with_the_servers_of_another_machine(material: Path, tmp_path: Path) -> None:
    run = TwoMachines(material, tmp_path, "launcher.nproc=2", "train.steps=60")
    try:
        wait_for(lambda: lines_of(run.output) >= 6, run.said)
        (before,) = servers(run.states)
        os.killpg(run.trainer.pid, signal.SIGKILL)
        run.trainer.wait()
        run.trainer = run.trains("resume=auto")
        assert run.trainer.wait() == 0 and run.server.wait() == 0, run.said()
    finally:
        run.end()
    assert "resumed at step" in run.trainer.said() and "features: training has ended" in run.server.said()
    assert run.server.said().count("starting vLLM") == 1 and not before.is_running(), "the server did not stay"
    assert not list(run.states.iterdir()) and not list(run.output.glob("*/servers"))
    (ended,) = (file.parent for file in run.output.glob("*/*/run.json"))
    whole = fit(material, tmp_path / "one", *started(tmp_path, run.states, "launcher.nproc=2", "train.steps=60"))
    assert digest(ended) == digest(whole) and losses(ended) == losses(whole)


@pytest.mark.slow
def test_servers_that_do_not_start_end_both_machines_in_one_line(material: Path, tmp_path: Path) -> None:
    run = TwoMachines(material, tmp_path, "features.gpus=64")
    try:
        assert run.trainer.wait() == 2 and run.server.wait() == 2, run.said()
    finally:
        run.end()
    fault = "the servers need 64 GPUs by features.gpus=64 and features.tensor_parallel=1, but their machine has "
    assert run.server.said().splitlines()[-1].startswith(f"drafttrain: {fault}"), run.said()
    assert run.trainer.said().splitlines()[-1].startswith("drafttrain: servers on ") and fault in run.trainer.said(), run.said()
