"""A training state is the same whoever reads it: one process or two, at any ZeRO stage, in either precision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.errors import UserError
from drafttrain.train.engine import join_world
from tests.integration.resharding import engine, resume, whole, write


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One process; every stage to every stage."""
    folder, world = tmp_path_factory.mktemp("alone"), join_world(torch.device("cpu"))
    write(folder, world)
    return resume(folder, 1, world)


@pytest.fixture(scope="module")
def others(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """From one process to two, and from two to one and two; every stage to every stage."""
    folder, world = tmp_path_factory.mktemp("others"), join_world(torch.device("cpu"))
    write(folder, world)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.integration.resharding"]
    done = subprocess.run([*command, str(folder)], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "resumed.json").read_text()) + resume(folder, 2, world)


@pytest.fixture(params=["alone", pytest.param("others", marks=pytest.mark.slow)])
def resumed(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = request.getfixturevalue(request.param)
    assert len(cases) == (1 if request.param == "alone" else 3) * 4 * 4 * 2
    return cases


def test_what_is_read_is_bit_for_bit_what_was_saved(resumed: list[dict[str, Any]]) -> None:
    for case in resumed:
        saved, read = whole(Path(case["source"])), whole(Path(case["again"]))
        for name in saved.keys() | read.keys():
            assert torch.equal(saved[name], read[name]), f"{name} of {case['again']}"
    assert {name.rsplit(":", 1)[-1] for name in saved} >= {"weight", "exp_avg", "exp_avg_sq", "step"}


def test_losses_go_on_as_if_nothing_had_changed(resumed: list[dict[str, Any]]) -> None:
    for case in resumed:
        uninterrupted = json.loads((Path(case["source"]) / "losses.json").read_text())
        narrow = "bfloat16" in case["source"]  # processes add their gradients up in it
        assert case["losses"] == pytest.approx(uninterrupted, rel=2e-2 if narrow else 1e-5), case["again"]


def test_missing_elements_are_named(tmp_path: Path) -> None:
    world = join_world(torch.device("cpu"))
    trained = engine(0, "float32", world)
    file = trained.save_state(tmp_path)
    pieces = load_file(file)
    pieces["inner.weight:weight:0"] = pieces["inner.weight:weight:0"][:30].clone()
    save_file(pieces, file)
    with pytest.raises(UserError, match=r"lacks elements 30 to 35 of inner\.weight \(weight\); resume from another"):
        engine(2, "float32", world).load_state(tmp_path, {})
