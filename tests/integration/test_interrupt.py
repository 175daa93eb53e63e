"""A run that is told to stop saves, says so by its exit code, and goes on to the weights it would have had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.integration.test_training import arguments, digest, fit, losses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ctrl_c_is_heard")]
STEPS = ("recipe=medusa", "train.steps=40", "train.checkpoint_every=20")
CODE = 75
LONG = (*STEPS[:1], "train.steps=4000", "train.checkpoint_every=2000")  # a run that does not end by itself


def lines_of(output: Path) -> int:
    return sum(file.read_text().count("\n") for file in output.glob("*/*/metrics.jsonl"))


def interrupted(command: list[str], output: Path, number: signal.Signals, lines: int) -> str:
    """Signal the first process alone once metrics.jsonl has so many lines; what it said."""
    process = forked.start(command)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None and lines_of(output) < lines:
        time.sleep(0.01)
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
        (signal.SIGTERM, ("launcher.nproc=2", "deepspeed=zero3")),
        (signal.SIGINT, ()),
        (signal.SIGINT, ("launcher.nproc=2",)),
    ],
)
def test_a_step_is_finished_saved_and_gone_on_from(
    number: signal.Signals, more: tuple[str, ...], material: Path, tmp_path: Path
) -> None:
    whole = fit(material, tmp_path / "whole", *STEPS, *more)
    broken = tmp_path / "broken"
    said = interrupted(arguments(material, broken, *STEPS, *more, "resume=auto"), broken, number, lines=3)
    done = lines_of(broken)
    assert f"drafttrain: interrupted after step {done} of 40, which is saved; resume=auto continues the run" in said
    assert "Traceback" not in said and 3 <= done < 40 and f"step-{done:05d}" in checkpoints(broken)
    run = fit(material, broken, *STEPS, *more, "resume=auto")
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
    assert checkpoints(broken) == checkpoints(tmp_path / "whole"), "what was saved in passing has gone"


@pytest.mark.parametrize("more", [(), ("launcher.nproc=2",)])
def test_before_the_first_step_there_is_nothing_to_save(more: tuple[str, ...], material: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        arguments(material, tmp_path, *STEPS, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("placement:")  # of the first process; the target is still to be read
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == CODE, said
    assert "Traceback" not in said and said.startswith("drafttrain: interrupted ")
    assert not checkpoints(tmp_path)


def test_while_it_measures_training_is_not_repeated(material: Path, tmp_path: Path) -> None:
    measured = [a for a in arguments(material, tmp_path, *STEPS, "resume=auto") if a != "measure.enabled=false"]
    process = subprocess.Popen(measured, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and "step-00040" not in checkpoints(tmp_path):
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == CODE and "Traceback" not in said, said
    again = subprocess.run(measured, capture_output=True, text=True, timeout=500)
    assert again.returncode == 0 and "resumed at step 40" in again.stdout, again.stdout + again.stderr
    (run,) = tmp_path.glob("*/*/run.json")
    assert json.loads(run.read_text())["finished"] and lines_of(tmp_path) == 40
    assert (run.parent / "report.json").is_file()


def test_workers_of_torchrun_exit_with_the_code(material: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", *arguments(material, tmp_path, *LONG, "resume=auto")[2:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and lines_of(tmp_path) < 3:
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    signal_one = next(child for child in children if b"drafttrain" in Path(f"/proc/{child}/cmdline").read_bytes())
    subprocess.run(["kill", "-USR1", signal_one], check=True)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and f"exitcode  : {CODE}" in said, said
    assert f"step-{lines_of(tmp_path):05d}" in checkpoints(tmp_path)


@pytest.mark.parametrize("more", [(), ("launcher.nproc=2",)])
def test_two_ctrl_c_of_a_terminal_end_it_at_once(more: tuple[str, ...], material: Path, tmp_path: Path) -> None:
    """They reach every process of the group."""
    process = subprocess.Popen(
        arguments(material, tmp_path, *LONG, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and lines_of(tmp_path) < 3:
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.05)  # or the two are one
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert process.returncode in (130, CODE, -signal.SIGINT) and "Traceback" not in said, (
        said
    )  # the last: while Python shut down
    assert said.count("press Ctrl-C again to end at once") <= 1
    assert gone(family)


def test_processes_end_with_their_launcher(material: Path, tmp_path: Path) -> None:
    """It is killed: they save, say so, and are gone."""
    process = subprocess.Popen(
        arguments(material, tmp_path, *LONG, "launcher.nproc=2", "resume=auto"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and lines_of(tmp_path) < 3:
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, said = process.communicate(timeout=20)  # until the last one has closed it
    assert "drafttrain: the launcher has died: interrupted after step" in said and "Traceback" not in said, said
    assert gone(family)
    assert f"step-{lines_of(tmp_path):05d}" in checkpoints(tmp_path)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=5)[1]
