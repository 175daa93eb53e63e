"""Training on states that servers compute: the losses and weights of training on the target itself, whatever fails."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console as RichConsole
from safetensors.torch import load_file

from drafttrain.core.errors import UserError
from drafttrain.data.dataset import Dataset
from drafttrain.drafters import families
from drafttrain.features import FeatureOptions
from drafttrain.features.engine import EngineStates
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import Taps
from drafttrain.objective.losses import LossOptions
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.caching import check_features
from drafttrain.train.engine import World, join_world
from drafttrain.train.engine_features import EngineFeatures
from drafttrain.train.job import TrainingJob
from drafttrain.train.progress import Console
from drafttrain.train.trainer import Trainer
from tests import forked
from tests.contract.test_families import SHAPES, build
from tests.integration.test_features import data, loaded
from tests.integration.test_training import arguments, digest, fit, kill_after, last_weights, losses, once, reach
from tests.standin.mooncake import Master, free_port, needs_mooncake
from tests.standin.served import States, states_server
from tests.standin.states_server import StandIn, serving

__all__ = ["data", "loaded"]
OPTIONS = TrainOptions(steps=3, global_batch=4, micro_batch=1, warmup=0.0, checkpoint_every=3)
FAMILIES = ("medusa", "eagle3", "dflash")


@pytest.fixture(scope="module")
def world() -> World:
    return join_world(torch.device("cpu"))


def computed(loaded: LoadedTarget, layers: tuple[int, ...]) -> Any:
    def compute(ids: list[int]) -> torch.Tensor:
        token_BT = torch.tensor([ids])
        zero_BT = torch.zeros_like(token_BT)
        batch = TrainBatch(token_BT, torch.arange(len(ids))[None], zero_BT, zero_BT.bool())
        hidden = Online(loaded.target, Taps(tuple(i - 1 for i in layers))).fill(batch).hidden
        return torch.stack([hidden[i - 1][0] for i in layers], 1)

    return compute


def train(job: TrainingJob, world: World, folder: Path, features: EngineStates | None) -> Path:
    torch.manual_seed(0)
    trainer = Trainer(replace(job, drafter=build(job.family, job.loaded.target), features=features), world, folder)
    folder.mkdir()
    (folder / "loss").write_text(str(trainer.train(None, Console(None)).loss))
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_engine_states_training_equals_training_on_local_target(
    name: str, micro_batch: int, loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path
) -> None:
    """Bit for bit where every row is computed by itself. In padded rows the target adds in another order than the server."""
    torch.manual_seed(0)
    shape, drafter = asdict(families()[name].options(**SHAPES[name])), build(name, loaded.target)
    options = replace(OPTIONS, micro_batch=micro_batch)
    job = TrainingJob(loaded, drafter, name, shape, data, options, DeepSpeedOptions(), LossOptions(), 4)
    features = EngineFeatures(FeatureOptions("engine", servers=["x"], ahead=3), loaded, drafter.taps, 64)
    standin, said = StandIn(computed(loaded, features.layers.ids), tmp_path / "states", {4: "status", 9: "half"}), StringIO()
    with serving(standin) as url:
        states = features.features(data, [url], None, "", world, Console(RichConsole(file=said, width=400)))
        ours = train(job, world, tmp_path / "ours", states)
    online = train(job, world, tmp_path / "online", None)
    assert "1 of 1 servers (vllm 0.32.0) give the target's states" in said.getvalue()
    assert states.totals()["repeated"] == 2 and not list((tmp_path / "states").iterdir())
    if micro_batch == 1:
        assert last_weights(ours).read_bytes() == last_weights(online).read_bytes()
        assert (ours / "loss").read_text() == (online / "loss").read_text()
        return
    assert float((ours / "loss").read_text()) == pytest.approx(float((online / "loss").read_text()), rel=1e-5)
    a, b = (load_file(last_weights(folder)) for folder in (online, ours))
    for key, tensor in a.items():
        torch.testing.assert_close(b[key], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"sequence_parallel": 2}, "train.sequence_parallel is 2, .*; set features=cached or online"),
        ({"on_policy": 0.5}, "features=engine requests the target's states in advance, but train.on_policy writes new replies"),
    ],
)
def test_engine_states_with_sequence_parallel_or_on_policy_are_refused(
    options: dict[str, Any], line: str, loaded: LoadedTarget
) -> None:
    with pytest.raises(UserError, match=line):
        check_features(FeatureOptions("engine"), build("medusa", loaded.target), replace(OPTIONS, **options), 64)


@pytest.mark.slow
def test_engine_states_killed_trainer_resumes_exactly_and_leaves_no_file(
    material: Path, states: States, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    for lines in (2, 7):
        kill_after(arguments(material, broken, *states.asked("resume=auto")), broken, lines=lines)
    run, whole = fit(material, broken, *states.asked("resume=auto", "features.ahead=2")), once(material, *states.asked())
    assert len(list(broken.glob("*/*/run.json"))) == 1, "resume=auto began a new run"
    assert digest(run) == digest(whole)
    assert losses(run) == losses(whole)
    assert not states.left()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    line = max(lines, key=lambda line: line.get("states_tokens_per_s", 0.0))  # the last steps' states came earlier
    assert line["states_tokens_per_s"] > 0 and 0 <= line["states_wait_share"] <= 1 and line["states_repeated"] == 0


@pytest.mark.slow
def test_engine_states_server_restarted_during_training_keeps_weights(material: Path, states: States, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    with states_server(material, folder, faults='{"20": "die"}') as first:
        trainer = forked.start(arguments(material, tmp_path / "broken", *first.asked()))
        assert first.process.wait() == 9
        trainer.wait_for("trying again for up to 600 s")
    with states_server(material, folder, port=first.port) as again:
        assert trainer.wait() == 0, trainer.said()
    assert "gives states again" in trainer.said()
    (run,) = (path.parent for path in (tmp_path / "broken").glob("*/*/run.json"))
    whole = once(material, *states.asked())
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
    assert not again.left()


@pytest.mark.slow
def test_engine_states_server_not_restarted_ends_run_in_one_line(material: Path, tmp_path: Path) -> None:
    with states_server(material, tmp_path / "states", faults='{"20": "die"}') as server:
        asked = server.asked("features.patience=2", "launcher.nproc=2")
        trainer = forked.start(arguments(material, tmp_path / "out", *asked))
        assert trainer.wait() == 2, trainer.said()
    last = trainer.said().strip().splitlines()[-1]
    assert last.startswith("drafttrain: http://127.0.0.1") and "repeat the command with resume=auto" in last
    assert not server.left()


@pytest.mark.slow
def test_engine_states_two_processes_losses_equal_one_process(material: Path, states: States, tmp_path: Path) -> None:
    two = fit(material, tmp_path / "two", *states.asked("launcher.nproc=2"))
    assert losses(two) == pytest.approx(losses(once(material, *states.asked())), rel=1e-5)
    assert not states.left()


@pytest.mark.slow
def test_engine_states_terminated_run_exits_and_leaves_no_file(material: Path, states: States, tmp_path: Path) -> None:
    long = states.asked("train.steps=4000", "train.checkpoint_every=2000")  # it does not end by itself
    trainer = forked.start(arguments(material, tmp_path, *long))
    reach(trainer, tmp_path, 1)
    os.kill(trainer.pid, signal.SIGTERM)
    assert trainer.wait() == 75, trainer.said()
    assert list(tmp_path.glob("*/*/checkpoints/step-*")) and not states.left()


@needs_mooncake
@pytest.mark.slow
def test_mooncake_states_with_killed_server_and_master_equal_file_weights(
    material: Path, states: States, tmp_path: Path
) -> None:
    """The server dies at a request, then the master is killed and comes back, and manifests and objects are damaged."""
    master, faults = Master(f"127.0.0.1:{free_port()}").start(), '{"5": "damaged", "8": "half", "12": "error", "20": "die"}'
    try:
        store = ("features.transport=mooncake", f"features.mooncake.master={master.address}")
        with states_server(material, master.address, faults=faults) as one:
            trainer = forked.start(arguments(material, tmp_path, *one.asked(*store)))
            assert one.process.wait() == 9
            master.kill()
            trainer.wait_for("trying again")
        master.start()
        with states_server(material, master.address, port=one.port):
            assert trainer.wait() == 0, trainer.said()
    finally:
        master.kill()
    (run,) = (path.parent for path in tmp_path.glob("*/*/run.json"))
    whole = once(material, *states.asked())
    assert digest(run) == digest(whole) and losses(run) == losses(whole)


@needs_mooncake
@pytest.mark.slow
def test_mooncake_states_master_not_restarted_ends_run_in_one_line(material: Path, tmp_path: Path) -> None:
    master = Master(f"127.0.0.1:{free_port()}").start()
    store = ("features.transport=mooncake", f"features.mooncake.master={master.address}", "features.patience=2")
    try:
        with states_server(material, master.address) as server:
            master.kill()
            trainer = forked.start(arguments(material, tmp_path / "out", *server.asked(*store)))
            assert trainer.wait() == 2, trainer.said()
    finally:
        master.kill()
    last = trainer.said().strip().splitlines()[-1]
    assert f"no mooncake_master answers at {master.address}" in last and "repeat the command with resume=auto" in last
