"""A run that is told to stop saves, says so by its exit code, and goes on to the weights it would have had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.integration.test_training import arguments, digest, fit, lines_of, losses, once, reach

__all__ = ["lines_of"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ctrl_c_is_heard")]
STEPS = ("recipe=medusa", "train.steps=40", "train.checkpoint_every=20")
CODE = 75
LONG = (*STEPS[:1], "train.steps=4000", "train.checkpoint_every=2000")  # a run that does not end by itself


def interrupted(command: list[str], output: Path, number: signal.Signals, lines: int) -> str:
    """Signal the first process alone once metrics.jsonl has so many lines; what it said."""
    process = forked.start(command)
    reach(process, output, lines)
    os.kill(process.pid, number)
    assert process.wait() == CODE, process.said()
    return process.said()


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in output.glob("*/*/checkpoints/*"))


@pytest.mark.parametrize(
    ("number", "more"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGUSR1, ("launcher.nproc=2",)),
        pytest.param(signal.SIGINT, ("launcher.nproc=2",), marks=pytest.mark.grid),  # a test below has two of them
        pytest.param(signal.SIGTERM, ("launcher.nproc=2", "deepspeed=zero3"), marks=pytest.mark.grid),
        pytest.param(signal.SIGINT, (), marks=pytest.mark.grid),
    ],
)
def test_fit_interrupted_by_signal_saves_step_and_resumes_exactly(
    number: signal.Signals, more: tuple[str, ...], material: Path, tmp_path: Path
) -> None:
    whole = once(material, *STEPS, *more)
    said = interrupted(arguments(material, tmp_path, *STEPS, *more, "resume=auto"), tmp_path, number, lines=3)
    done = lines_of(tmp_path)
    assert f"drafttrain: interrupted after step {done} of 40, which is saved; resume=auto continues the run" in said
    assert "Traceback" not in said and 3 <= done < 40 and f"step-{done:05d}" in checkpoints(tmp_path)
    run = fit(material, tmp_path, *STEPS, *more, "resume=auto")
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
    assert checkpoints(tmp_path) == checkpoints(whole.parents[1]), "what was saved in passing has gone"


TWO = ("launcher.nproc=2",)


class Command:
    """A fresh process, the leader of a group, whose output is in a file."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.output = folder / "said.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        self.pid, self.poll = self.process.pid, self.process.poll

    def said(self) -> str:
        return self.output.read_text()

    def wait_for(self, happened: Callable[[], object]) -> None:
        while not happened():
            assert self.poll() is None, self.said()
            time.sleep(0.01)

    def family(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return psutil.Process(self.pid).children(recursive=True)

    def end(self) -> None:
        """Of all processes of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Command]]:
    """Starts a command; its group ends with the test."""
    started: list[Command] = []

    def begin(command: list[str]) -> Command:
        started.append(Command(command, tmp_path))
        return started[-1]

    yield begin
    for process in started:
        process.end()


Start = Callable[[list[str]], Command]


@pytest.mark.sampled(more=[TWO])
@pytest.mark.parametrize("more", [(), TWO])
def test_fit_interrupted_before_first_step_saves_no_checkpoint(
    more: tuple[str, ...], start: Start, material: Path, tmp_path: Path
) -> None:
    process = start(arguments(material, tmp_path, *STEPS, *more))
    process.wait_for(lambda: process.said().startswith("placement:"))  # of the first process; the target is still to be read
    os.kill(process.pid, signal.SIGTERM)
    assert process.process.wait() == CODE, process.said()
    said = process.said()
    assert "Traceback" not in said and said.splitlines()[-1].startswith("drafttrain: interrupted ")
    assert not checkpoints(tmp_path)


def test_fit_interrupted_while_measuring_resumes_without_training(material: Path, tmp_path: Path) -> None:
    short = ("measure.repeats=1", "measure.timed_prompts=1", "measure.batch_sizes=[1]", f"prompts={tmp_path / 'prompts.jsonl'}")
    (tmp_path / "prompts.jsonl").write_text('{"question_id": 1, "turns": ["abc"]}\n')
    command = [word for word in arguments(material, tmp_path, *STEPS, "resume=auto") if word != "measure.enabled=false"]
    process = forked.start(command)
    while not list(tmp_path.glob("*/*/checkpoints/step-00040/golden.safetensors")):  # the last that is done before
        assert process.poll() is None, process.said()
        time.sleep(0.01)
    began = seconds_of(process.pid)
    while process.poll() is None and seconds_of(process.pid) < began + 0.5:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait() == CODE and "Traceback" not in process.said(), process.said()
    assert "resumed at step 40" in forked.run([*command, *short])
    (run,) = tmp_path.glob("*/*/run.json")
    logged = [json.loads(line) for line in run.with_name("metrics.jsonl").read_text().splitlines()]
    assert json.loads(run.read_text())["finished"] and sum("loss" in line for line in logged) == 40
    assert (run.parent / "report.json").is_file()


def seconds_of(pid: int) -> float:
    """Of a processor."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def test_fit_interrupted_torchrun_worker_exits_with_code_75(start: Start, material: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    process = start([*command, "-m", *arguments(material, tmp_path, *LONG, "resume=auto")[2:]])
    process.wait_for(lambda: lines_of(tmp_path) >= 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    signal_one = next(child for child in children if b"drafttrain" in Path(f"/proc/{child}/cmdline").read_bytes())
    os.kill(int(signal_one), signal.SIGUSR1)
    assert process.process.wait() != 0 and f"exitcode  : {CODE}" in process.said(), process.said()
    assert f"step-{lines_of(tmp_path):05d}" in checkpoints(tmp_path)


@pytest.mark.sampled(more=[TWO])
@pytest.mark.parametrize("more", [(), TWO])
def test_fit_second_ctrl_c_ends_all_processes_at_once(
    more: tuple[str, ...], start: Start, material: Path, tmp_path: Path
) -> None:
    """They reach every process of the group."""
    process = start(arguments(material, tmp_path, *LONG, *more))
    process.wait_for(lambda: lines_of(tmp_path) >= 3)
    family, again = process.family(), "press Ctrl-C again to end at once"
    os.killpg(process.pid, signal.SIGINT)
    process.wait_for(lambda: again in process.said())  # or the two are one
    os.killpg(process.pid, signal.SIGINT)
    code, said = process.process.wait(), process.said()
    assert code in (130, CODE, -signal.SIGINT) and "Traceback" not in said, said  # the last: while Python shut down
    assert said.count(again) == 1
    assert gone(family)


def test_fit_killed_launcher_makes_workers_save_and_exit(start: Start, material: Path, tmp_path: Path) -> None:
    """It is killed: they save, say so, and are gone."""
    process = start(arguments(material, tmp_path, *LONG, *TWO, "resume=auto"))
    process.wait_for(lambda: lines_of(tmp_path) >= 3)
    family = process.family()
    process.process.kill()
    assert gone(family)
    said = process.said()
    assert "drafttrain: the launcher has died: interrupted after step" in said and "Traceback" not in said, said
    assert f"step-{lines_of(tmp_path):05d}" in checkpoints(tmp_path)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=120)[1]
