"""Shared by all tests: small thread counts, quiet libraries, and one command line at a time."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from drafttrain.cli import main as cli
from drafttrain.cli.quiet import quiet
from tests import composing

quiet()
os.environ["WANDB_MODE"] = "offline"
torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests marked `sampled`, all cases but a few are slow: see `a_few`.

    The longest tests, those that start processes, come first, so that two workers end together.
    """
    items.sort(key=lambda item: "tests/integration/" not in item.nodeid)
    by_test: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled") and hasattr(item, "callspec"):
            by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in by_test.values():
        few = a_few(cases)
        for item in cases:
            if item not in few:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What all modules hold is no garbage: without it a collection takes milliseconds, not half a second."""
    gc.collect()
    gc.freeze()


def a_few(cases: list[pytest.Function]) -> list[pytest.Function]:
    """So many that each value of each parameter occurs in one, of those values that the marker leaves.

    `sampled(name=["medusa", "eagle3"])` leaves two values of the parameter `name`, and all of the others.
    """
    marker = cases[0].get_closest_marker("sampled")
    assert marker is not None
    values = [{(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases]
    open_ = [
        i for i, case in enumerate(cases) if all(case.callspec.params[name] in only for name, only in marker.kwargs.items())
    ]
    assert open_, f"no case is left by {marker}"
    wanted, few = set().union(*(values[i] for i in open_)), []
    while wanted:
        best = max(open_, key=lambda i: len(values[i] & wanted))
        wanted -= values[best]
        few.append(cases[best])
    return few
