"""Commands, launches and modules in processes of their own that import nothing: a server has imported all, and forks for each.

A fresh process imports for six seconds, and then trains for one. The server starts no threads, has no process group and no
model, so its children are like fresh processes. Where a test's environment asks for stand-ins of GPUs (`tests/devices.py`),
another server has them. Tests that are about how processes start and end still start `python -m drafttrain`. On Linux all
processes end with the server, and it with the tests.
"""

from __future__ import annotations

import atexit
import base64
import ctypes
import gc
import io
import json
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch

from drafttrain.core.errors import Interrupted, UserError, WorkerError
from drafttrain.ops import library
from drafttrain.runs.options import RunOptions

ROOT = Path(__file__).parent.parent
AT_START = ("PYTHONPATH", "STANDIN_LIBRARY", "STANDIN_DEVICES", "DS_ACCELERATOR", library.SWITCH)  # variables read at imports
PR_SET_PDEATHSIG = 1  # of prctl(2)
Variables = tuple[tuple[str, str], ...]


class Server:
    """The process that forks. given: variables of its environment."""

    def __init__(self, given: Variables) -> None:
        command = [sys.executable, "-m", "tests.forked"]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        kept = {name: value for name, value in os.environ.items() if name not in AT_START}
        variables = kept | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device} | dict(given)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=variables, **pipes)
        atexit.register(self.end)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@cache
def server(given: Variables) -> Server:
    return Server(given)


def server_for(environment: Mapping[str, str]) -> Server:
    return server(tuple((name, environment[name]) for name in AT_START if name in environment))


@dataclass(eq=False)
class Forked:
    """A process of the server, the leader of its group; like `subprocess.Popen`."""

    pid: int
    output: Path
    parent: Server
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.parent.ask(wait=self.pid)
        return self.returncode

    def wait(self) -> int:
        """Here and not in the server: a test that is given up while it waits leaves no answer behind."""
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, what: str) -> re.Match[str]:
        """Wait until it says what this pattern finds."""
        while not (found := re.search(what, self.said(), re.MULTILINE)):
            assert self.poll() is None, f"it ended with {self.returncode}: {self.said()}"
            time.sleep(0.01)
        return found

    def kill(self) -> None:
        """Kill it and the processes of its group."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


STARTED: list[Forked] = []


@contextmanager
def none_left() -> Iterator[None]:
    """Commands and launches that were started within and still run, as a test that fails leaves them, are killed."""
    before = len(STARTED)
    try:
        yield
    finally:
        for process in STARTED[before:]:
            process.kill()
        del STARTED[before:]


def start(
    command: list[str],
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    constants: Mapping[str, float] | None = None,
) -> Forked:
    """Start `[python, "-m", "drafttrain", ...]`; stdout and stderr are one file.

    folder, environment: this process's unless they are given. constants: other values of the package's, by `module.NAME`, so
    that a test need not wait.
    """
    assert command[1:3] == ["-m", "drafttrain"]
    STARTED.append(_fork(folder, environment, argv=command[3:], constants=constants or {}))
    return STARTED[-1]


def run(command: list[str]) -> str:
    """Start it and wait; what it said. It must end well."""
    process = start(command)
    assert process.wait() == 0, process.said()
    return process.said()


def launch(work: Any, options: RunOptions, resolved: dict[str, Any]) -> None:
    """`drafttrain.cli.launch.launch`. All processes must end well."""
    process = start_launch(work, options, resolved)
    assert process.wait() == 0, process.said()


def start_launch(work: Any, options: RunOptions, resolved: dict[str, Any]) -> Forked:
    """The same without waiting. An error is the last line that it says, `UserError: the line`."""
    STARTED.append(_fork(work=base64.b64encode(pickle.dumps((work, options, resolved))).decode()))
    return STARTED[-1]


@contextmanager
def module(name: str, *words: str) -> Iterator[Forked]:
    """`python -m NAME WORDS`, until the end of the block."""
    process = _fork(module=name, argv=list(words))
    try:
        yield process
    finally:
        process.kill()


def _fork(folder: Path | None = None, environment: Mapping[str, str] | None = None, **work: Any) -> Forked:
    handle, name = tempfile.mkstemp(prefix="forked-", suffix=".txt")
    os.close(handle)
    variables = dict(environment or os.environ)
    parent = server_for(variables)
    pid = parent.ask(**work, output=name, folder=str(folder or os.getcwd()), environment=variables)
    return Forked(pid, Path(name), parent)


def serve(requests: TextIO, answers: TextIO) -> dict[str, Any] | None:
    """Answer requests until there are no more. In a forked child it returns the child's work."""
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                return dict(request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return None


def become(request: dict[str, Any], *inherited: TextIO) -> None:
    """What a shell does between fork and exec."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for stream in (0, *(stream.fileno() for stream in inherited)):  # the numbers stay in use: their files close them once more
        os.dup2(null, stream)
    os.dup2(output, 1), os.dup2(output, 2)
    os.close(null), os.close(output)


def method_name(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


def main() -> None:
    """Import, then serve."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import deepspeed.runtime.zero.muon.muon_optimizer as muon  # with it the compiler, which every ZeRO engine imports
    import pandas
    import peft
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher import api as elastic
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.llama import modeling_llama

    from drafttrain.cli import launch as launching
    from drafttrain.cli import main as cli
    from drafttrain.commands import fit, measure, prepare
    from drafttrain.drafters import families
    from drafttrain.train.engine import load_deepspeed
    from tests import composing

    assert fit and measure and prepare and muon and pandas and peft and modeling_llama and families()
    load_deepspeed()
    get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all models, once in a process
    for owner, name, quicker in composing.PATCHES:
        setattr(owner, name, quicker)
    with redirect_stdout(io.StringIO()):
        cli.run(["fit", "--cfg", "job"])  # imports what a composition needs
    gc.collect()
    gc.freeze()  # of modules: children collect garbage for half a second otherwise, and copy all pages
    torch.set_num_threads(1)
    # after a fork torch makes its pool of threads anew at the next use; two of autograd's threads at once ended a process
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
    elastic.LaunchConfig = partial(elastic.LaunchConfig, start_method="fork")  # type: ignore[misc,assignment]
    dynamic_rendezvous.get_method_name = method_name  # reads the sources of the whole stack otherwise, for a label in a log
    request = serve(requests, answers)
    if request is None:
        return
    become(request, requests, answers)
    if "work" in request:
        work, options, resolved = pickle.loads(base64.b64decode(request["work"]))
        try:
            launching.launch(work, options, resolved)
        except (UserError, WorkerError, Interrupted) as error:
            sys.exit(f"{type(error).__name__}: {error}")
    elif "module" in request:
        sys.argv = [request["module"], *request["argv"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    else:
        for constant, value in request["constants"].items():
            owner, _, name = constant.rpartition(".")
            setattr(import_module(owner), name, value)
        sys.argv = [str(ROOT / "drafttrain" / "__main__.py"), *request["argv"]]
        cli.main()


if __name__ == "__main__":
    main()
