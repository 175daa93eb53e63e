"""`launcher.nproc=N`: N real processes, torchrun's variables, one line for a user's mistake."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from drafttrain.commands.launch import launch
from drafttrain.commands.run import LauncherOptions, RunOptions
from drafttrain.errors import UserError

pytestmark = pytest.mark.slow


def sums_ranks(options: RunOptions, resolved: dict[str, Any]) -> None:
    distributed.init_process_group("gloo")
    total = torch.tensor([float(distributed.get_rank() + 1)])
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    if options.name != "x" or resolved != {"a": 1} or total.item() != 3.0 or "OMP_NUM_THREADS" not in os.environ:
        raise AssertionError(f"{options.name} {resolved} {total}")


def complains_on_rank_1(options: RunOptions, resolved: dict[str, Any]) -> None:
    if os.environ["RANK"] == "1":
        raise UserError("one line; mend it")
    time.sleep(60)


def has_a_bug(options: RunOptions, resolved: dict[str, Any]) -> None:
    raise RuntimeError("a bug")


OPTIONS = RunOptions(name="x", launcher=LauncherOptions(nproc=2))


def test_processes_form_a_group() -> None:
    launch(sums_ranks, OPTIONS, {"a": 1})


def test_a_users_mistake_on_one_rank_ends_all_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^one line; mend it$"):
        launch(complains_on_rank_1, OPTIONS, {})
    assert time.monotonic() - began < 50
    assert capfd.readouterr().err == ""


def test_a_bug_shows_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildFailedError):
        launch(has_a_bug, OPTIONS, {})
    assert "RuntimeError: a bug" in capfd.readouterr().err


def test_nproc_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="under torchrun"):
        launch(sums_ranks, OPTIONS, {})
