"""`features.target=ends`: training without the target's blocks, with the weights, records and checks of the whole target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console as RichConsole
from safetensors import safe_open

from drafttrain.core.errors import UserError
from drafttrain.data.dataset import Dataset
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import TargetRecord, load_drafter, read_meta
from drafttrain.features import FeatureOptions
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.losses import LossOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.frozen_ends import FrozenEnds
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.load_ends import LoadedEnds, load_ends
from drafttrain.targets.pieces import Pieces
from drafttrain.train import DeepSpeedOptions
from drafttrain.train.engine import World, join_world
from drafttrain.train.engine_features import EngineFeatures
from drafttrain.train.job import TrainingJob
from drafttrain.train.progress import Console
from drafttrain.train.streamed_states import StreamedStates
from drafttrain.train.trainer import Trainer
from tests.contract.test_families import SHAPES
from tests.integration.test_engine_features import OPTIONS, computed, free_port, ready, served, server
from tests.integration.test_features import data, loaded
from tests.integration.test_training import arguments, digest, fit, kill_after, last_weights, losses
from tests.standin.states_server import StandIn, serving

__all__ = ["data", "loaded"]
FAMILIES = ("medusa", "eagle3", "dflash")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drafttrain" / "targets"


@pytest.fixture(scope="module")
def world() -> World:
    return join_world(torch.device("cpu"))


def ends_of(material: Path, **options: Any) -> LoadedEnds:
    return load_ends(TargetOptions(name="hf", path=str(material / "target"), **options))


def trained(
    name: str, loaded: LoadedTarget, whole: LoadedTarget, data: Dataset, world: World, folder: Path, url: str
) -> tuple[Path, str]:
    """The run's folder, and what was said about the servers."""
    said, options = StringIO(), families()[name].options(**SHAPES[name])
    torch.manual_seed(0)
    drafter = families()[name].build(options, loaded.target)
    features = EngineFeatures(FeatureOptions("engine", servers=["x"]), loaded, drafter.taps, 64)
    states = features.features(data, [url], None, "", world, Console(RichConsole(file=said, width=400)))
    job = TrainingJob(
        loaded, drafter, name, asdict(options), data, OPTIONS, DeepSpeedOptions(), LossOptions(), 4, features=states
    )
    torch.manual_seed(0)
    drafter = families()[name].build(options, loaded.target)
    trainer = Trainer(replace(job, drafter=drafter), world, folder)
    trainer.train(None, Console(None))
    return folder, said.getvalue()


@pytest.mark.parametrize("name", FAMILIES)
def test_training_is_that_with_the_whole_target(
    name: str, material: Path, loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path
) -> None:
    ends = ends_of(material)
    StreamedStates(ends, 64).learn(world, Console(None))
    drafter = families()[name].build(families()[name].options(**SHAPES[name]), loaded.target)
    layers = EngineFeatures(FeatureOptions("engine"), loaded, drafter.taps, 64).layers.ids
    with serving(StandIn(computed(loaded, layers), tmp_path / "states")) as url:
        whole, _ = trained(name, loaded, loaded, data, world, tmp_path / "whole", url)
        alone, said = trained(name, ends.loaded, loaded, data, world, tmp_path / "ends", url)
    assert "1 of 1 servers (vllm 0.32.0) give the target's states" in said
    assert last_weights(alone).read_bytes() == last_weights(whole).read_bytes()
    records = [read_meta(last_weights(folder).parent) for folder in (alone, whole)]
    assert records[0] == records[1] and records[0].target.fingerprint == loaded.target.fingerprint
    assert load_drafter(last_weights(alone).parent, loaded.target)[1].family == name
