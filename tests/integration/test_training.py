"""Training for real, in processes of its own: kill and resume, one process and two, ZeRO stages."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import forked

SETTINGS = (
    "logger=none",
    "measure.enabled=false",
    "target.dtype=float32",  # on a stand-in for a GPU too
    "train.precision=float32",
    "data.held_out=4",
    "train.global_batch=4",
    "train.micro_batch=2",
    "train.log_every=50",
)


def arguments(material: Path, output: Path, *more: str) -> list[str]:
    paths = (f"target.path={material / 'target'}", f"data.path={material / 'data.jsonl'}", f"output={output}")
    return [sys.executable, "-m", "drafttrain", "fit", "target=hf", *paths, *SETTINGS, *more]


def fit(material: Path, output: Path, *more: str) -> Path:
    """Run to the end; the run directory."""
    forked.run(arguments(material, output, *more))
    return sorted(output.glob("*/*/run.json"))[-1].parent


def once(material: Path, *more: str) -> Path:
    """The run directory of `fit` with these settings, which is trained once for all tests of a session: they only read it."""
    key = hashlib.sha256(repr(more).encode()).hexdigest()[:16]
    return _once(material, material / "runs" / key, more)


@cache
def _once(material: Path, output: Path, more: tuple[str, ...]) -> Path:
    return fit(material, output, *more)


def by_adamw(recipe: str) -> tuple[str, ...]:
    """The recipe, for runs whose sums are in another order than those they are compared with: what Muon rounds to bfloat16 then
    moves losses by 1e-4 within few steps, even between micro-batches of one process. `test_muon.py` compares its updates.
    """
    return (f"recipe={recipe}", *(("train.optimizer=adamw", "train.lr=5e-3") if recipe == "eagle3" else ()))


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def last_weights(run: Path) -> Path:
    return sorted(run.glob("checkpoints/step-*"))[-1] / "drafter.safetensors"


def digest(run: Path) -> str:
    return hashlib.sha256(last_weights(run).read_bytes()).hexdigest()


def lines_of(output: Path) -> int:
    """Of the metrics of all runs."""
    return sum(file.read_bytes().count(b"\n") for file in output.glob("*/*/metrics.jsonl"))


def reach(process: forked.Forked, output: Path, lines: int) -> None:
    """Wait until metrics.jsonl has so many lines."""
    while lines_of(output) < lines:
        assert process.poll() is None, f"the run ended before it had {lines} lines: {process.said()}"
        time.sleep(0.01)


def kill_after(command: list[str], output: Path, lines: int) -> None:
    """Start, wait until metrics.jsonl has so many lines, SIGKILL the whole group."""
    process = forked.start(command)
    reach(process, output, lines)
    assert process.poll() is None, "the run ended before it could be killed"
    process.kill()


@pytest.mark.slow
@pytest.mark.sampled(recipe=["medusa", "eagle3"])
@pytest.mark.parametrize("recipe", ["medusa", "eagle3", "draft_model"])
def test_fit_killed_twice_resumes_to_same_weights(recipe: str, material: Path, tmp_path: Path) -> None:
    """eagle3 with a curriculum, whose place follows from the step."""
    steps = (f"recipe={recipe}", "train.steps=30", "train.checkpoint_every=6")
    steps += ("drafter.growing_steps=true", "loss.entropy_drop=0.4") if recipe == "eagle3" else ()
    whole, broken = once(material, *steps), tmp_path / "broken"
    kill_after(arguments(material, broken, *steps, "resume=auto"), broken, lines=2)
    kill_after(arguments(material, broken, *steps, "resume=auto"), broken, lines=15)
    run = fit(material, broken, *steps, "resume=auto")
    assert len(list(broken.glob("*/*/run.json"))) == 1, "resume=auto began a new run"
    assert digest(run) == digest(whole)
    assert losses(run) == losses(whole)
    assert json.loads((run / "run.json").read_text())["finished"]


@pytest.mark.slow
def test_fit_two_processes_losses_and_weights_equal_one_process(material: Path, tmp_path: Path) -> None:
    steps = ("recipe=medusa", "train.steps=8")
    one = once(material, *steps)
    two = fit(material, tmp_path / "two", *steps, "launcher.nproc=2")
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    a, b = load_file(last_weights(one)), load_file(last_weights(two))
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.sampled(recipe=["eagle3"])
@pytest.mark.parametrize("recipe", ["medusa", "eagle3", "draft_model"])
def test_fit_bfloat16_losses_are_close_to_float32(recipe: str, material: Path, tmp_path: Path) -> None:
    steps = (f"recipe={recipe}", "train.steps=6", "train.lr=1e-3")
    one = once(material, *steps)
    narrow = fit(material, tmp_path / "narrow", *steps, "train.precision=bfloat16")
    assert losses(narrow) == pytest.approx(losses(one), rel=0.03) and losses(narrow) != losses(one)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("recipe", ["medusa", "eagle3", "draft_model"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fit_zero_stage_losses_equal_one_process(recipe: str, stage: int, material: Path, tmp_path: Path) -> None:
    steps = (*by_adamw(recipe), "train.steps=4", "train.global_batch=4")
    one = once(material, *steps)
    sharded = fit(material, tmp_path / "sharded", *steps, f"deepspeed=zero{stage}", "launcher.nproc=2")
    assert losses(sharded) == pytest.approx(losses(one), rel=1e-5)


XPRESS = ("drafter.block_size=4", "loss.chunk=480")
BLOCKS = ("train.optimizer=adamw", "drafter.target_layer_ids=[0,1]", "drafter.anchors=64")
UNLIKE = [  # in make test-slow: steps, a confidence beside them, a module of the target
    ("recipe=eagle3", "train.optimizer=adamw", "train.lr=5e-3"),
    ("recipe=dspark", *BLOCKS, "drafter.weights=dpace"),
    ("drafter=mtp_native", "drafter.source=fresh", "train.optimizer=adamw", "train.lr=1e-3", "loss.name=ce"),
]


@pytest.mark.slow
@pytest.mark.sampled(drafter=UNLIKE)
@pytest.mark.parametrize(
    "drafter",
    [
        *UNLIKE,
        ("recipe=medusa",),
        # pieces have whole blocks; the time of DeepSpeed's hooks grows with the square of their calls
        ("recipe=xpress", *BLOCKS, *XPRESS),
        *((f"recipe={name}", *BLOCKS, "drafter.block_size=4") for name in ("domino", "dflare", "dfly", "lilicorr")),
    ],
    ids=lambda given: given[0],
)
def test_fit_zero3_uneven_chunks_per_process_losses_equal_one_process(
    drafter: tuple[str, ...], material: Path, tmp_path: Path
) -> None:
    """Each process has its own number of predictions, so of chunks. DeepSpeed is told to divide small parameters too."""
    steps = ("train.steps=4", "loss.chunk=8", *drafter)
    extra = "+deepspeed.extra={zero_optimization:{stage:3,stage3_param_persistence_threshold:0}}"
    divided = fit(material, tmp_path / "divided", *steps, "deepspeed=zero3", "launcher.nproc=2", extra)
    assert losses(divided) == pytest.approx(losses(once(material, *steps)), rel=1e-5)


@pytest.mark.slow
def test_fit_auto_tree_nodes_are_saved_at_zero2_and_refused_at_zero3(material: Path, tmp_path: Path) -> None:
    steps = ("recipe=medusa", "train.steps=4", "train.checkpoint_every=2", "decode.tree_nodes=null", "launcher.nproc=2")
    run = fit(material, tmp_path / "two", *steps, "deepspeed=zero2")
    assert json.loads((last_weights(run).parent / "drafter.json").read_text())["decode"]["paths"]
    command = arguments(material, tmp_path / "three", *steps, "deepspeed=zero3")
    refused = forked.start(command)
    assert refused.wait() == 2 and "decode.tree_nodes=null needs whole weights" in refused.said()
    assert not list((tmp_path / "three").glob("*/*/checkpoints/*"))


@pytest.mark.slow
@pytest.mark.sampled(stage=[3])
@pytest.mark.parametrize("stage", [2, 3])
def test_fit_sharded_optimizer_state_resumes_to_same_weights(stage: int, material: Path, tmp_path: Path) -> None:
    steps = ("recipe=medusa", "train.steps=12", "train.checkpoint_every=4", f"deepspeed=zero{stage}", "launcher.nproc=2")
    whole, broken = once(material, *steps), tmp_path / "broken"
    kill_after(arguments(material, broken, *steps, "resume=auto"), broken, lines=6)
    run = fit(material, broken, *steps, "resume=auto")
    assert digest(run) == digest(whole)
