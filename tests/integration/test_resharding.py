"""A training state is the same whoever reads it: one process or two, at any ZeRO stage, in either precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.core.errors import UserError
from drafttrain.train.engine import join_world
from tests.integration.resharding import END, KINDS, PAIRS, SELECTED, engine, source, whole

Cases = list[dict[str, Any]]


# MKL's products depend on where in memory a matrix begins, and ZeRO-3 gathers parameters into other places in an engine's first
# step than in later ones. In this mode they do not.
SAME_BITS = os.environ | {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}


def resharded(root: Path, folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> Cases:
    """The cases of `resharding.py`, in processes of their own."""
    command = [sys.executable, *launcher, "-m", "tests.integration.resharding", str(folder), *words]
    done = subprocess.run(command, cwd=root, env=SAME_BITS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases: Cases = json.loads((folder / "resumed.json").read_text())
    return cases


@pytest.fixture(scope="module")
def few(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """One process; from each stage to itself and to another."""
    return resharded(root, tmp_path_factory.mktemp("few"), "few", "1")


def with_two(root: Path, alone: Cases, which: str) -> Cases:
    """One process's cases, and those from one to two and from two to one and two."""
    folder = Path(alone[0]["source"]).parent
    both = resharded(root, folder, which, "1", "2", launcher=("-m", "torch.distributed.run", "--nproc-per-node", "2"))
    return alone + both + resharded(root, folder, which, "2")


@pytest.fixture(scope="module")
def few_with_two(root: Path, few: Cases) -> Cases:
    return with_two(root, few, "few")


@pytest.fixture(scope="module")
def every_with_two(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Every optimiser in either precision; every stage to every stage."""
    return with_two(root, resharded(root, tmp_path_factory.mktemp("every"), "every", "1"), "every")


WHICH = [pytest.param("few_with_two", marks=pytest.mark.slow), pytest.param("every_with_two", marks=pytest.mark.grid)]


@pytest.fixture(params=WHICH)
def resumed(request: pytest.FixtureRequest) -> Cases:
    cases: Cases = request.getfixturevalue(request.param)
    which = request.param.removesuffix("_with_two")
    assert len(cases) == 4 * len(PAIRS[which]) * len(SELECTED[which])
    return cases


def test_resharded_training_state_reads_back_bit_identical(resumed: Cases) -> None:
    for case in resumed:
        saved, read = whole(Path(case["source"])), whole(Path(case["again"]))
        for name in saved.keys() | read.keys():
            assert torch.equal(saved[name], read[name]), f"{name} of {case['again']}"
        keys = {name.rsplit(":", 1)[-1] for name in saved}
        assert keys >= {"weight", "exp_avg", "exp_avg_sq", "step"}
        assert ("momentum_buffer" in keys) == ("muon" in Path(case["source"]).name)


def test_resharded_training_state_losses_continue_unchanged(resumed: Cases) -> None:
    for case in resumed:
        uninterrupted = json.loads((Path(case["source"]) / "losses.json").read_text())
        narrow = "bfloat16" in Path(case["source"]).name  # processes add their gradients up in it
        assert case["losses"] == pytest.approx(uninterrupted, rel=2e-2 if narrow else 1e-5), case["again"]


def test_resumed_state_at_same_stage_and_processes_ends_bit_identical(resumed: Cases) -> None:
    same = [case for case in resumed if case["same"]]
    assert sorted(case["source"] for case in same) == sorted({case["source"] for case in resumed})
    for case in same:
        ended, again = (load_file(Path(case[place]) / END) for place in ("source", "again"))
        assert ended.keys() == again.keys()
        for name in ended:
            assert torch.equal(ended[name], again[name]), f"{name} of {case['again']}"


def test_resharded_float32_weights_equal_one_process_at_stage_0(resumed: Cases) -> None:
    """In float32, of runs that nothing interrupted and of those that were resumed."""
    folder = Path(resumed[0]["source"]).parent
    kinds = [kind for kind in KINDS if "float32" in kind and source(folder, 1, kind, 0).is_dir()]
    assert kinds
    for kind in kinds:
        reference = load_file(source(folder, 1, kind, 0) / END)
        cases = [case for case in resumed if "-".join(kind) in Path(case["source"]).name]
        for place in [Path(case[which]) for case in cases for which in ("source", "again")]:
            for name, tensor in load_file(place / END).items():
                torch.testing.assert_close(tensor, reference[name], atol=1e-5, rtol=1e-4, msg=lambda m, at=place: f"{at}: {m}")


def test_training_state_with_missing_elements_error_names_them(tmp_path: Path) -> None:
    world = join_world(torch.device("cpu"))
    trained = engine(0, "adamw", "float32", world)
    file = trained.save_state(tmp_path)
    pieces = load_file(file)
    pieces["inner.weight:weight:0"] = pieces["inner.weight:weight:0"][:30].clone()
    save_file(pieces, file)
    with pytest.raises(UserError, match=r"lacks elements 30 to 35 of inner\.weight \(weight\); resume from another"):
        engine(2, "adamw", "float32", world).load_state(tmp_path, {})
