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
from tests.integration.test_training import arguments, digest, lines_of, losses, once, reach
from tests.standin.mooncake import Master, free_port, needs_mooncake, remove_left
from tests.standin.served import STEPS, States
from tests.standin.vllm import python


def begin(words: list[str]) -> forked.Forked:
    """A command that looks at its servers often."""
    return forked.start(words, constants={"drafttrain.engines.states_server.LOOK": 0.02})


def servers(where: Path | str) -> list[psutil.Process]:
    """The processes of servers that write into a folder below this one, or into the store of this master.

    A child that a server has forked has the server's command line until it executes its own: it does not count.
    """
    found = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        line = " ".join(process.info["cmdline"] or [])
        if "tests.standin.vllm" in line and str(where) in line:
            found[process.pid] = process
    return [process for process in found.values() if process.info["ppid"] not in found]


def started(folder: Path, where: Path | str, *more: str) -> tuple[str, ...]:
    """Options of a run that starts its servers. folder: for the "Python" with vLLM. where: the folder of the states' files, or
    the address of Mooncake's master.
    """
    store = ("features.transport=mooncake", f"features.mooncake.master={where}", f"features.mooncake.segment={64 << 20}")
    own = (f"features.python={python(folder)}", *(store if isinstance(where, str) else (f"features.dir={where}",)))
    return (*STEPS, "features=engine", "data.max_length=64", "train.micro_batch=1", *own, *more)


@pytest.mark.slow
def test_started_servers_killed_server_restarts_and_weights_are_unchanged(
    material: Path, states: States, tmp_path: Path
) -> None:
    """The other one stands still meanwhile, so that the run does not end before."""
    folder, steps = tmp_path / "states", ("train.steps=60", "train.checkpoint_every=60")
    trainer = begin(
        arguments(material, tmp_path / "two", *started(tmp_path, folder, "features.count=2", "features.timeout=600", *steps))
    )
    reach(trainer, tmp_path / "two", 3)
    first, second = servers(folder)
    second.suspend()
    first.kill()
    trainer.wait_for("it starts again")
    assert lines_of(tmp_path / "two") < 60, "the run has ended before the kill"
    second.resume()
    assert trainer.wait() == 0, trainer.said()
    assert "features: starting vLLM, which takes a minute or more: 2 servers; 1 process trains on the" in trainer.said()
    assert "2 of 2 servers (vllm 0.32.0) give the target's states" in trainer.said()
    assert not servers(folder) and not list(folder.iterdir())
    run = next((tmp_path / "two").glob("*/*/run.json")).parent
    whole = once(material, *states.asked("train.micro_batch=1", *steps))
    assert digest(run) == digest(whole) and losses(run) == losses(whole)


@pytest.mark.slow
def test_started_servers_two_nodes_start_one_server_each(material: Path, states: States, tmp_path: Path) -> None:
    folder, place = tmp_path / "states", ("launcher.nodes=2", f"launcher.rendezvous=localhost:{free_port()}")
    words = arguments(material, tmp_path / "two", *started(tmp_path, folder, *place))
    both = [begin(words) for _ in range(2)]
    most, end = 0, time.monotonic() + 300
    while any(process.poll() is None for process in both) and time.monotonic() < end:
        most = max(most, len(servers(folder)))
        time.sleep(0.05)
    assert [process.wait() for process in both] == [0, 0], both[0].said()
    assert most == 2
    assert not list(folder.iterdir())
    run = next((tmp_path / "two").glob("*/*/run.json")).parent
    whole = once(material, *states.asked("train.micro_batch=1", "launcher.nproc=2"))
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
        return begin([*self.words, "launcher.role=server"])

    def trains(self, *more: str) -> forked.Forked:
        return begin([*self.words, *more])

    def said(self) -> str:
        return f"== servers\n{self.server.said()}\n== trainers\n{self.trainer.said()}"

    def wait_for(self, happened: Callable[[], object]) -> None:
        while not happened():
            assert self.trainer.poll() is None, self.said()
            time.sleep(0.02)

    def as_on_one_machine(self, material: Path, folder: Path, states: States, *more: str) -> None:
        """Nothing is left, and weights and losses are those of files on one machine."""
        assert not servers(self.where) and not list(self.output.glob("*/servers"))
        assert not [*self.output.glob("drafttrain-states*"), *folder.glob("states/*")]
        (run,) = (file.parent for file in self.output.glob("*/*/run.json"))
        whole = once(material, *states.asked("train.micro_batch=1", *more))
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
def test_started_servers_killed_trainers_resume_with_remote_servers(
    transport: str, material: Path, states: States, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    master = request.getfixturevalue("master") if transport == "mooncake" else None
    steps = ("launcher.nproc=2", "train.steps=60")
    run = TwoMachines(material, tmp_path, master.address if master else tmp_path / "states", *steps)
    run.wait_for(lambda: lines_of(run.output) >= 6)
    (before,) = servers(run.where)
    run.trainer.kill()
    run.trainer = run.trains("resume=auto")
    run.wait_for(lambda: run.server.said().count(" give states") == 2)
    ended(run, master)
    assert "resumed at step" in run.trainer.said()
    assert run.server.said().count("starting vLLM") == 1 and not before.is_running(), "the server did not stay"
    run.as_on_one_machine(material, tmp_path, states, *steps)


@needs_mooncake
@pytest.mark.slow
def test_started_servers_mooncake_server_and_node_killed_keep_weights(
    master: Master, material: Path, states: States, tmp_path: Path
) -> None:
    steps = ("launcher.nproc=2", "train.steps=150", "train.checkpoint_every=150")
    run = TwoMachines(material, tmp_path, master.address, *steps)
    run.wait_for(lambda: lines_of(run.output) >= 3)
    (server,) = servers(run.where)
    server.kill()
    run.wait_for(lambda: "it starts again" in run.server.said())
    reached = lines_of(run.output)
    run.wait_for(lambda: lines_of(run.output) > reached + 10)
    os.kill(run.server.pid, signal.SIGKILL)
    run.server.wait()
    assert lines_of(run.output) < 150, "the run has ended before the kill"
    run.wait_for(lambda: not servers(run.where))
    run.server = run.serves()
    run.wait_for(lambda: " give states" in run.server.said())
    ended(run, master)
    run.as_on_one_machine(material, tmp_path, states, *steps)


@pytest.mark.slow
def test_started_servers_that_cannot_start_end_both_nodes_in_one_line(material: Path, tmp_path: Path) -> None:
    run = TwoMachines(material, tmp_path, tmp_path / "states", "features.gpus=64")
    assert run.trainer.wait() == 2 and run.server.wait() == 2, run.said()
    fault = "the servers need 64 GPUs by features.gpus=64 and features.tensor_parallel=1, but their machine has "
    assert run.server.said().splitlines()[-1].startswith(f"drafttrain: {fault}"), run.said()
    assert run.trainer.said().splitlines()[-1].startswith("drafttrain: servers on ") and fault in run.trainer.said(), run.said()
