"""Training on states from SGLang: the losses and weights of training on the target itself. The servers are stand-ins."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console as RichConsole
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.data.dataset import Dataset
from drafttrain.drafters import families
from drafttrain.features import FeatureOptions
from drafttrain.features.mooncake_store import StoreSettings
from drafttrain.objective.losses import LossOptions
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import DeepSpeedOptions
from drafttrain.train.engine import World
from drafttrain.train.engine_features import EngineFeatures
from drafttrain.train.job import TrainingJob
from drafttrain.train.progress import Console
from tests.contract.test_families import SHAPES, build
from tests.integration.test_engine_features import OPTIONS, train, world
from tests.integration.test_features import data, loaded
from tests.integration.test_training import arguments, digest, fit, kill_after, last_weights, losses
from tests.standin.mooncake import Master, connected, free_port, needs_mooncake
from tests.standin.served import sglang_server
from tests.standin.sglang_server import Arguments, Patched, SglangHandler, StandIn
from tests.standin.states_server import serving
from tests.unit.features.test_capture import Memory
from tests.unit.features.test_sglang import computed

__all__ = ["data", "loaded", "world"]
FULL = {"return_hidden_states_mode": "full"}


def aux(blocks: tuple[int, ...]) -> dict[str, Any]:
    return {"enable_return_aux_hidden_states": True, "return_aux_hidden_state_layer_ids": list(blocks)}


def trained(
    name: str, servers: list[StandIn], store: StoreSettings | None, loaded: LoadedTarget, data: Dataset, world: World, out: Path
) -> tuple[Path, Path, str]:
    """The folders of a run on these servers' states and of one on the target itself, and what was said."""
    torch.manual_seed(0)
    shape, drafter = asdict(families()[name].options(**SHAPES[name])), build(name, loaded.target)
    job = TrainingJob(loaded, drafter, name, shape, data, OPTIONS, DeepSpeedOptions(), LossOptions(), 4)
    said = StringIO()
    with ExitStack() as stack:
        first, *others = [stack.enter_context(serving(one, kind=SglangHandler)) for one in servers]
        options = FeatureOptions("engine", engine="sglang", servers=[first], final_servers=others, ahead=3)
        features = EngineFeatures(options, loaded, drafter.taps, 64)
        states = features.features(data, [first], None, "so", world, Console(RichConsole(file=said, width=400)), store)
        ours = train(job, world, out / "ours", states)
    assert states.totals()["repeated"] == 2
    return ours, train(job, world, out / "online", None), said.getvalue()


def same(ours: Path, online: Path) -> None:
    assert last_weights(ours).read_bytes() == last_weights(online).read_bytes()
    assert (ours / "loss").read_text() == (online / "loss").read_text()


@pytest.mark.sampled(kind=["final", "two", "capture"])  # `last` gives what `two` give together
@pytest.mark.parametrize(
    ("name", "kind", "line"),
    [
        ("medusa", "final", "1 of 1 servers (sglang 0.5.23) give the target's states of the last norm in float32"),
        ("eagle3", "two", "2 of 2 servers (sglang 0.5.23) give the target's states of the blocks"),
        ("eagle3", "last", "1 of 1 servers (sglang 0.5.23) give the target's states of the blocks"),
        ("eagle3", "capture", "1 of 1 servers (sglang 0.5.14 with SpecForge's patch) give the target's states of the blocks"),
    ],
)
def test_sglang_states_training_equals_training_on_local_target(
    name: str,
    kind: str,
    line: str,
    loaded: LoadedTarget,
    data: Dataset,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit in float32, one conversation a micro-batch, with two failures."""
    monkeypatch.setitem(SHAPES["eagle3"], "target_layer_ids", [0, 1, 2])  # few models give the last block's output
    faults, memory, blocks = {4: "status", 9: "nan"}, Memory(), build(name, loaded.target).taps.blocks
    compute, last = computed(loaded.target), loaded.target.shape.blocks - 1
    monkeypatch.setattr("drafttrain.train.engine_features.MooncakeStore", lambda settings: memory)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    servers = {
        "final": [StandIn(compute, Arguments(**FULL), faults)],
        "two": [StandIn(compute, Arguments(**aux(blocks)), faults), StandIn(compute, Arguments(**FULL))],
        "last": [StandIn(compute, Arguments(**aux((*blocks, last))), faults, last=True)],
        "capture": [StandIn(compute, Patched(spec_capture_aux_layer_ids=list(blocks)), faults, put=memory.put)],
    }[kind]
    store = memory.settings if kind == "capture" else None
    ours, online, said = trained(name, servers, store, loaded, data, world, tmp_path)
    assert line in said and not memory.objects
    same(ours, online)


@needs_mooncake
@pytest.mark.slow
def test_sglang_states_over_mooncake_training_equals_local_target(
    loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES["eagle3"], "target_layer_ids", [0, 1, 2])
    master = Master(f"127.0.0.1:{free_port()}").start()
    try:
        client, blocks = connected(master.address, 64 << 20), build("eagle3", loaded.target).taps.blocks

        def put(key: str, tensor: Tensor) -> None:
            assert client.put(key, tensor.view(torch.uint8).flatten().numpy().tobytes()) == 0

        compute = computed(loaded.target)
        standin = StandIn(compute, Patched(spec_capture_aux_layer_ids=list(blocks)), {4: "status", 9: "nan"}, put=put)
        store = StoreSettings(master.address, buffer=4 << 20)
        ours, online, _ = trained("eagle3", [standin], store, loaded, data, world, tmp_path)
        same(ours, online)
        assert client.remove_by_regex(".*") == 0, "every object was removed"
        client.close()
    finally:
        master.kill()


def test_sglang_final_servers_without_target_layer_ids_are_refused(loaded: LoadedTarget, data: Dataset, world: World) -> None:
    options = FeatureOptions("engine", engine="sglang", servers=["http://a:1"], final_servers=["http://a:2"])
    features = EngineFeatures(options, loaded, build("medusa", loaded.target).taps, 64)
    with pytest.raises(UserError, match=r"this drafter taps no block; name these servers in features.servers"):
        features.features(data, ["http://a:1"], None, "", world, Console(None))


@pytest.mark.slow
def test_sglang_states_killed_trainer_resumes_to_same_weights(material: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    with sglang_server(material, json.dumps(FULL)) as server:
        options = server.asked("features.engine=sglang")
        whole = fit(material, tmp_path / "whole", *options)
        kill_after(arguments(material, broken, *options, "resume=auto"), broken, lines=5)
        run = fit(material, broken, *options, "resume=auto")
    assert len(list(broken.glob("*/*/run.json"))) == 1, "resume=auto began a new run"
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
