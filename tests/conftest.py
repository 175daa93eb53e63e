"""Shared by all tests: small thread counts, quiet libraries, and one command line at a time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from drafttrain.cli import main as cli
from drafttrain.cli.quiet import quiet

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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["drafttrain"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    return lambda *arguments: cli.run(arguments)
