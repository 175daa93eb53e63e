"""Two training steps of every family: two processes under ZeRO-2 have the losses, and leave the weights, of one process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.data import DataOptions
from drafttrain.data.dataset import load_dataset
from drafttrain.drafters import families
from drafttrain.objective.losses import LossOptions
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import join_world, leave_world
from drafttrain.train.job import TrainingJob
from drafttrain.train.progress import Console
from drafttrain.train.trainer import Trainer
from tests.contract.test_families import NAMES, SHAPES, build
from tests.forked import launch
from tests.helpers import FEW, chosen

OPTIONS = TrainOptions(steps=2, global_batch=4, micro_batch=2, warmup=0.0, checkpoint_every=2)


def train_every_family(options: RunOptions, resolved: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    loaded = load_target(TargetOptions(name="hf", path=resolved["target"]))
    data = load_dataset(DataOptions(path=resolved["data"], held_out=2), loaded.tokenizer, progress=False)
    world = join_world(torch.device("cpu"))
    for name in resolved["families"]:
        drafter = build(name, loaded.target)
        shape = asdict(families()[name].options(**SHAPES.get(name, {})))
        stage = DeepSpeedOptions(zero_stage=resolved["stage"])
        job = TrainingJob(loaded, drafter, name, shape, data, OPTIONS, stage, LossOptions(), 4)
        progress = Trainer(job, world, Path(resolved["output"]) / name).train(None, Console(None))
        if world.first:
            (Path(resolved["output"]) / name / "loss").write_text(str(progress.loss))
    leave_world(world)


def run(material: Path, output: Path, stage: int, processes: int, names: list[str]) -> Path:
    target = load_target(TargetOptions(name="hf", path=str(material / "target"))).target
    learning = [name for name in names if build(name, target).trained]
    paths = {"target": str(material / "target"), "data": str(material / "data.jsonl"), "output": str(output)}
    output.mkdir()
    for name in learning:
        (output / name).mkdir()
    options = RunOptions(launcher=LauncherOptions(nproc=processes))
    launch(train_every_family, options, {**paths, "families": learning, "stage": stage})
    return output


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, material: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sharded")
    names = [name for (name,) in chosen(request, test_family_trained_by_two_processes_at_zero2_equals_one_process, "name")]
    return run(material, folder / "one", 0, 1, names), run(material, folder / "two", 2, 2, names)


@pytest.mark.slow
@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", NAMES)
def test_family_trained_by_two_processes_at_zero2_equals_one_process(name: str, runs: tuple[Path, Path]) -> None:
    one, two = (folder / name for folder in runs)
    if not one.exists():
        pytest.skip("trains nothing")
    assert float((two / "loss").read_text()) == pytest.approx(float((one / "loss").read_text()), rel=1e-5)
    a, b = (load_file(folder / "checkpoints" / "step-00002" / "drafter.safetensors") for folder in (one, two))
    assert a.keys() == b.keys() and a
    for key, tensor in a.items():
        torch.testing.assert_close(b[key], tensor, atol=1e-4, rtol=1e-3, msg=f"{name}: {key}")
