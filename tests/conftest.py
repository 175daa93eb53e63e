"""Shared by all tests: small thread counts, quiet libraries, and one command line at a time."""

from __future__ import annotations

import gc
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.cli import main as cli
from drafttrain.cli.quiet import quiet
from tests import composing

quiet()
os.environ["WANDB_MODE"] = "offline"
torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
RESUME = Path(os.environ["RESUME"]) if os.environ.get("RESUME") else None  # names of the cases that need not run again

PASSED = RESUME.read_text().splitlines() if RESUME and RESUME.exists() else []
RESUMED = int(
    os.environ.setdefault("RESUMED", str(len(PASSED)))
)  # a worker that replaces one that died collects the same cases
LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}  # variables
FAILED = set[str]()
LEFT = pytest.StashKey[int]()  # cases of grids that this run leaves out


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def no_launcher_is_left() -> Iterator[None]:
    """Take away a launcher's variables that a test has left: accelerate sets them where a process group is there."""
    before = LAUNCHER & os.environ.keys()
    yield
    for name in (LAUNCHER & os.environ.keys()) - before:
        del os.environ[name]


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """By this process and those that it starts: a shell starts what it runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run `drafttrain ARGUMENTS` in this process, from an empty folder; the exit code."""
    for owner, name, quicker in composing.PATCHES:
        monkeypatch.setattr(owner, name, quicker)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["drafttrain"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    return lambda *arguments: cli.run(arguments)


@pytest.fixture
def deepspeed_world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The `World` of this process alone, for engines. ZeRO 3 replaces torch's `linear` for good: it is put back."""
    from drafttrain.train.engine import join_world

    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
    return join_world(torch.device("cpu"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `sampled` keep a few cases, and the rest are a grid.

    The longest tests, those that start processes, come first, so that two workers end together.
    """
    items.sort(key=lambda item: "tests/integration/" not in item.nodeid)
    by_test: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled") and hasattr(item, "callspec"):
            by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in by_test.values():
        few = a_few(cases)
        for case in cases:
            if case not in few:
                case.add_marker(pytest.mark.grid)
    part, parts = (int(number) for number in (os.environ.get("SHARD") or "1/1").split("/"))
    done = set(PASSED[:RESUMED])
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part - 1 and item.nodeid not in done]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that collects the results: the cases without a failure, for the next run with the same RESUME."""
    if report.failed:
        FAILED.add(report.nodeid)
    if RESUME and report.when == "teardown" and report.nodeid not in FAILED and "PYTEST_XDIST_WORKER" not in os.environ:
        with RESUME.open("a") as file:
            file.write(f"{report.nodeid}\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What all modules hold is no garbage: without it a collection takes milliseconds, not half a second."""
    gc.collect()
    gc.freeze()


def a_few(cases: list[pytest.Function]) -> list[pytest.Function]:
    """So many that each value of each parameter occurs in one, of those values that the marker leaves.

    `sampled(family=["medusa", "eagle3"])` leaves two values of the parameter `family`, and all of the others. Values that
    must occur again come in turns, so that families meet different policies.
    """
    marker = cases[0].get_closest_marker("sampled")
    assert marker is not None
    values = [{(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases]
    open_ = [
        i for i, case in enumerate(cases) if all(case.callspec.params[name] in only for name, only in marker.kwargs.items())
    ]
    if not open_:  # as when one case is asked for by its id
        return cases
    wanted, used, few = set().union(*(values[i] for i in open_)), Counter[tuple[str, str]](), []
    while wanted:
        best = max(open_, key=lambda i: (len(values[i] & wanted), -sum(used[value] for value in values[i])))
        wanted -= values[best]
        used.update(values[best])
        few.append(cases[best])
    return few


def pytest_deselected(items: list[pytest.Item]) -> None:
    stash = items[0].config.stash
    stash[LEFT] = stash.get(LEFT, 0) + sum(item.get_closest_marker("grid") is not None for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes
        session.config.workeroutput["left"] = session.config.stash.get(LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process has collected all tests."""
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, 0):
        terminalreporter.write_line(f"{left:,} cases of complete grids are left to make test-all")
