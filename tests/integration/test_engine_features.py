"""Training on states that servers compute: the losses and weights of training on the target itself, whatever fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
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
from tests.integration.test_training import arguments, digest, fit, kill_after, last_weights, losses
from tests.standin.mooncake import Master, needs_mooncake
from tests.standin.states_server import StandIn, serving

__all__ = ["data", "loaded"]
OPTIONS = TrainOptions(steps=3, global_batch=4, micro_batch=1, warmup=0.0, checkpoint_every=3)
FAMILIES = ("medusa", "eagle3", "dflash")
ROOT = Path(__file__).parents[2]
STEPS = ("recipe=medusa", "train.steps=12", "train.checkpoint_every=4")


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


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_training_is_that_on_the_target_itself(
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
def test_what_cannot_be_requested_is_refused(options: dict[str, Any], line: str, loaded: LoadedTarget) -> None:
    with pytest.raises(UserError, match=line):
        check_features(FeatureOptions("engine"), build("medusa", loaded.target), replace(OPTIONS, **options), 64)


def test_images_are_refused(loaded: LoadedTarget, data: Dataset, world: World) -> None:
    features = EngineFeatures(FeatureOptions("engine", servers=["x"]), loaded, Taps(), 64)
    pictured = SimpleNamespace(has_images=True)
    with pytest.raises(UserError, match="features=engine takes text alone"):
        features.features(pictured, ["http://x"], None, "", world, Console(None))  # type: ignore[arg-type]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def server(
    material: Path, where: Path | str, port: int, layers: str = "4", faults: str = "{}"
) -> Iterator[subprocess.Popen[str]]:
    """The stand-in as a process. where: the folder of its files, or the address of Mooncake's master."""
    module = f"tests.standin.{'mooncake' if isinstance(where, str) else 'states'}_server"
    command = [sys.executable, "-m", module, str(material / "target"), str(where), layers]
    process = subprocess.Popen([*command, str(port), faults], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdout.readline() == "ready\n"


def served(port: int, *more: str) -> tuple[str, ...]:
    address = f"features.servers=[http://127.0.0.1:{port}]"
    return (*STEPS, "features=engine", address, "data.max_length=64", *more)


@pytest.mark.slow
def test_a_killed_trainer_goes_on_to_the_same_weights_and_leaves_no_file(material: Path, tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "states"
    with server(material, folder, port) as process:
        ready(process)
        whole = fit(material, tmp_path / "whole", *served(port))
        broken = tmp_path / "broken"
        for lines in (2, 7):
            kill_after(arguments(material, broken, *served(port, "resume=auto")), broken, lines=lines)
        run = fit(material, broken, *served(port, "resume=auto", "features.ahead=2"))
    assert len(list(broken.glob("*/*/run.json"))) == 1, "resume=auto began a new run"
    assert digest(run) == digest(whole)
    assert losses(run) == losses(whole)
    assert not list(folder.iterdir())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    line = max(lines, key=lambda line: line.get("states_tokens_per_s", 0.0))  # the last steps' states came earlier
    assert line["states_tokens_per_s"] > 0 and 0 <= line["states_wait_share"] <= 1 and line["states_repeated"] == 0


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_changes_nothing(material: Path, tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "states"
    with server(material, folder, port, faults='{"20": "die"}') as process:
        ready(process)
        trainer = forked.start(arguments(material, tmp_path / "broken", *served(port)))
        assert process.wait(120) == 9
        time.sleep(1)
    with server(material, folder, port) as process:
        ready(process)
        assert trainer.wait() == 0, trainer.said()
        whole = fit(material, tmp_path / "whole", *served(port))
    assert "trying again for up to 600 s" in trainer.said() and "gives states again" in trainer.said()
    (run,) = (path.parent for path in (tmp_path / "broken").glob("*/*/run.json"))
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_server_that_stays_away_ends_the_run_in_one_line(material: Path, tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "states"
    with server(material, folder, port, faults='{"20": "die"}') as process:
        ready(process)
        trainer = forked.start(arguments(material, tmp_path / "out", *served(port, "features.patience=2", "launcher.nproc=2")))
        assert trainer.wait() == 2, trainer.said()
    last = trainer.said().strip().splitlines()[-1]
    assert last.startswith("drafttrain: http://127.0.0.1") and "repeat the command with resume=auto" in last
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(material: Path, tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "states"
    with server(material, folder, port) as process:
        ready(process)
        one = fit(material, tmp_path / "one", *served(port))
        two = fit(material, tmp_path / "two", *served(port, "launcher.nproc=2"))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_stopped_run_saves_and_leaves_no_file(material: Path, tmp_path: Path) -> None:
    port, folder, output = free_port(), tmp_path / "states", tmp_path / "out"
    with server(material, folder, port) as process:
        ready(process)
        trainer = forked.start(arguments(material, output, *served(port)))
        until = time.monotonic() + 120
        while not list(output.glob("*/*/metrics.jsonl")) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(trainer.pid, signal.SIGTERM)
        assert trainer.wait() in (75, 0), trainer.said()
    assert not list(folder.iterdir())


@needs_mooncake
@pytest.mark.slow
def test_mooncake_gives_the_weights_of_files_whatever_is_killed(material: Path, tmp_path: Path) -> None:
    """The server dies at a request, then the master is killed and comes back, and manifests and objects are damaged."""
    port, other, folder = free_port(), free_port(), tmp_path / "states"
    with server(material, folder, port) as process:
        ready(process)
        whole = fit(material, tmp_path / "files", *served(port))
    master = Master(f"127.0.0.1:{free_port()}").start()
    output = tmp_path / "mooncake"
    try:
        store = ("features.transport=mooncake", f"features.mooncake.master={master.address}")
        with server(material, master.address, other, faults='{"5": "damaged", "8": "half", "12": "error", "20": "die"}') as one:
            ready(one)
            trainer = forked.start(arguments(material, output, *served(other, *store)))
            assert one.wait(240) == 9
            master.kill()
            time.sleep(1)
        master.start()
        with server(material, master.address, other) as again:
            ready(again)
            assert trainer.wait() == 0, trainer.said()
    finally:
        master.kill()
    (run,) = (path.parent for path in output.glob("*/*/run.json"))
    assert digest(run) == digest(whole) and losses(run) == losses(whole)


@needs_mooncake
@pytest.mark.slow
def test_a_mooncake_master_that_stays_away_ends_the_run_in_one_line(material: Path, tmp_path: Path) -> None:
    port, master = free_port(), Master(f"127.0.0.1:{free_port()}").start()
    store = ("features.transport=mooncake", f"features.mooncake.master={master.address}", "features.patience=2")
    try:
        with server(material, master.address, port) as process:
            ready(process)
            master.kill()
            trainer = forked.start(arguments(material, tmp_path / "out", *served(port, *store)))
            assert trainer.wait() == 2, trainer.said()
    finally:
        master.kill()
    last = trainer.said().strip().splitlines()[-1]
    assert f"no mooncake_master answers at {master.address}" in last and "repeat the command with resume=auto" in last
