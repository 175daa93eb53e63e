"""Servers of states that the run starts, several here or on another machine, with a stand-in in place of vLLM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.integration.test_engine_features import STEPS, free_port
from tests.integration.test_interrupt import lines_of
from tests.integration.test_training import arguments, digest, fit, losses
from tests.standin.mooncake import Master, needs_mooncake, remove_left
from tests.standin.vllm import python


def wait_for(happened: Callable[[], object], said: Callable[[], str]) -> None:
    until = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < until, said()
        time.sleep(0.05)


def servers(where: Path | str) -> list[psutil.Process]:
    """The processes of servers that write into a folder below this one, or into the store of this master."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "tests.standin.vllm" in line and str(where) in line:
            found.append(process)
    return found


def started(folder: Path, where: Path | str, *more: str) -> tuple[str, ...]:
    """Options of a run that starts its servers. folder: for the "Python" with vLLM. where: the folder of the states' files, or
    the address of Mooncake's master.
    """
    store = ("features.transport=mooncake", f"features.mooncake.master={where}", f"features.mooncake.segment={64 << 20}")
    own = (f"features.python={python(folder)}", *(store if isinstance(where, str) else (f"features.dir={where}",)))
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

    def __init__(self, material: Path, folder: Path, where: Path | str, *more: str) -> None:
        """where: as of `started`."""
        self.output, self.where = folder / "outputs", where
        place = ("launcher.nodes=2", f"launcher.rendezvous=127.0.0.1:{free_port()}", "features.nodes=1")
        self.words = arguments(material, self.output, *started(folder, where, *place, *more))
        self.server, self.trainer = self.serves(), self.trains()

    def serves(self) -> forked.Forked:
        return forked.start([*self.words, "launcher.role=server"])

    def trains(self, *more: str) -> forked.Forked:
        return forked.start([*self.words, *more])

    def said(self) -> str:
        return f"== servers\n{self.server.said()}\n== trainers\n{self.trainer.said()}"

    def end(self) -> None:
        for process in (self.server, self.trainer):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def as_on_one_machine(self, material: Path, folder: Path, *more: str) -> None:
        """Nothing is left, and weights and losses are those of files on one machine."""
        assert not servers(self.where) and not list(self.output.glob("*/servers"))
        assert not [*self.output.glob("drafttrain-states*"), *folder.glob("states/*")]
        (run,) = (file.parent for file in self.output.glob("*/*/run.json"))
        whole = fit(material, folder / "one", *started(folder, folder / "states", *more))
        assert digest(run) == digest(whole) and losses(run) == losses(whole)


@pytest.fixture
def master() -> Iterator[Master]:
    started = Master(f"127.0.0.1:{free_port()}").start()
    yield started
    started.kill()


def ended(run: TwoMachines, master: Master | None) -> None:
    """Both machines end well, with no object in Mooncake's store. Its server, whose memory it is, waits until that is seen."""
    if master is not None:
        os.kill(run.server.pid, signal.SIGSTOP)
    assert run.trainer.wait() == 0, run.said()
    if master is not None:
        assert servers(run.where) and not remove_left(master.address)
        os.kill(run.server.pid, signal.SIGCONT)
    assert run.server.wait() == 0, run.said()
    assert "features: training has ended" in run.server.said()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["files", pytest.param("mooncake", marks=needs_mooncake)])
def test_trainers_that_are_killed_go_on_with_the_servers_of_another_machine(
    transport: str, material: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    master, steps = (
        request.getfixturevalue("master") if transport == "mooncake" else None,
        ("launcher.nproc=2", "train.steps=60"),
    )
    run = TwoMachines(material, tmp_path, master.address if master else tmp_path / "states", *steps)
    try:
        wait_for(lambda: lines_of(run.output) >= 6, run.said)
        (before,) = servers(run.where)
        os.killpg(run.trainer.pid, signal.SIGKILL)
        run.trainer.wait()
        run.trainer = run.trains("resume=auto")
        wait_for(lambda: run.server.said().count(" give states") == 2, run.said)
        ended(run, master)
    finally:
        run.end()
    assert "resumed at step" in run.trainer.said()
    assert run.server.said().count("starting vLLM") == 1 and not before.is_running(), "the server did not stay"
    run.as_on_one_machine(material, tmp_path, *steps)


@needs_mooncake
@pytest.mark.slow
def test_a_server_and_its_machine_are_killed_while_states_come_by_mooncake(
    master: Master, material: Path, tmp_path: Path
) -> None:
    steps = ("launcher.nproc=2", "train.steps=150", "train.checkpoint_every=150")
    run = TwoMachines(material, tmp_path, master.address, *steps)
    try:
        wait_for(lambda: lines_of(run.output) >= 3, run.said)
        (server,) = servers(run.where)
        server.kill()
        wait_for(lambda: "it starts again" in run.server.said(), run.said)
        reached = lines_of(run.output)
        wait_for(lambda: lines_of(run.output) > reached + 10, run.said)
        os.kill(run.server.pid, signal.SIGKILL)
        run.server.wait()
        assert lines_of(run.output) < 150, "the run has ended before the kill"
        wait_for(lambda: not servers(run.where), run.said)
        run.server = run.serves()
        wait_for(lambda: " give states" in run.server.said(), run.said)
        ended(run, master)
    finally:
        run.end()
    run.as_on_one_machine(material, tmp_path, *steps)


@pytest.mark.slow
def test_servers_that_do_not_start_end_both_machines_in_one_line(material: Path, tmp_path: Path) -> None:
    run = TwoMachines(material, tmp_path, tmp_path / "states", "features.gpus=64")
    try:
        assert run.trainer.wait() == 2 and run.server.wait() == 2, run.said()
    finally:
        run.end()
    fault = "the servers need 64 GPUs by features.gpus=64 and features.tensor_parallel=1, but their machine has "
    assert run.server.said().splitlines()[-1].startswith(f"drafttrain: {fault}"), run.said()
    assert run.trainer.said().splitlines()[-1].startswith("drafttrain: servers on ") and fault in run.trainer.said(), run.said()
