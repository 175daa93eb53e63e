"""Training on features from disk: the losses and weights of training on the target itself, and what is done about damage."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console as RichConsole
from safetensors.torch import load_file

from drafttrain.core.errors import Interrupted, UserError
from drafttrain.data import DataOptions
from drafttrain.data.dataset import Dataset, load_dataset
from drafttrain.drafters import families
from drafttrain.features import FeatureOptions
from drafttrain.features import store as store_module
from drafttrain.features.cached import Cached
from drafttrain.model.batch import TrainBatch
from drafttrain.objective.losses import LossOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.caching import Caching, check_features
from drafttrain.train.engine import TrainingEngine, World, join_world
from drafttrain.train.job import TrainingJob
from drafttrain.train.logger import ToHost
from drafttrain.train.progress import Console
from drafttrain.train.step_batches import Batches
from drafttrain.train.trainer import Trainer
from tests import forked
from tests.contract.test_families import SHAPES, build
from tests.integration.test_training import arguments, by_adamw, fit, last_weights, losses, once

OPTIONS = TrainOptions(steps=4, global_batch=4, micro_batch=2, warmup=0.0, checkpoint_every=4)
FAMILIES = ("medusa", "eagle3", "draft_model")


@pytest.fixture(scope="module")
def loaded(material: Path) -> LoadedTarget:
    return load_target(TargetOptions(name="hf", path=str(material / "target")))


@pytest.fixture(scope="module")
def data(material: Path, loaded: LoadedTarget) -> Dataset:
    return load_dataset(DataOptions(path=str(material / "data.jsonl"), held_out=4), loaded.tokenizer, progress=False)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(store_module, "MIN_SHARD_TOKENS", 200)
    return join_world(torch.device("cpu"))


def cached(name: str, loaded: LoadedTarget, data: Dataset, world: World, root: Path, **options: object) -> tuple[Cached, str]:
    """The features, and what was said about them."""
    said = StringIO()
    caching = Caching(FeatureOptions("cached", **options), loaded, build(name, loaded.target).taps, root, 2)  # type: ignore[arg-type]
    features = caching.features(data, world, Console(RichConsole(file=said, width=400)))
    return features, said.getvalue()


def train(name: str, loaded: LoadedTarget, data: Dataset, world: World, folder: Path, features: Cached | None) -> Path:
    torch.manual_seed(0)
    shape = asdict(families()[name].options(**SHAPES[name]))
    job = TrainingJob(loaded, build(name, loaded.target), name, shape, data, OPTIONS, DeepSpeedOptions(), LossOptions(), 4)
    trainer = Trainer(replace(job, features=features), world, folder)
    folder.mkdir()
    (folder / "loss").write_text(str(trainer.train(None, Console(None)).loss))
    return folder


# Medusa reads the final state alone, which EAGLE-3's layout has too
@pytest.mark.sampled(name=["eagle3", "draft_model"])
@pytest.mark.parametrize("name", FAMILIES)
def test_cached_float32_states_training_equals_online_without_target_blocks(
    name: str, loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path
) -> None:
    features, _ = cached(name, loaded, data, world, tmp_path, format="float32")
    online = train(name, loaded, data, world, tmp_path / "online", None)
    blocks = [block.register_forward_pre_hook(_must_not_run) for block in loaded.target.backbone.module.layers]
    try:
        ours = train(name, loaded, data, world, tmp_path / "cached", features)
    finally:
        for hook in blocks:
            hook.remove()
    assert float((ours / "loss").read_text()) == pytest.approx(float((online / "loss").read_text()), rel=1e-6)
    a, b = (load_file(last_weights(folder)) for folder in (online, ours))
    for key, tensor in a.items():
        torch.testing.assert_close(b[key], tensor, atol=1e-5, rtol=1e-4)
    taus = [json.loads((f / "checkpoints/step-00004/trainer.json").read_text())["expected_tau"] for f in (online, ours)]
    assert taus[0] == pytest.approx(taus[1])


@pytest.mark.parametrize("name", ["eagle3"])
def test_cached_states_read_ahead_training_is_bit_identical_to_serial(
    name: str, loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, _ = cached(name, loaded, data, world, tmp_path)
    begun: list[TrainBatch] = []
    ahead = Cached.begin
    monkeypatch.setattr(Cached, "begin", lambda self, batch: begun.append(batch) or ahead(self, batch))
    ours = train(name, loaded, data, world, tmp_path / "ahead", features)
    assert len(begun) == OPTIONS.steps * 2 - 1, "every micro-batch but the first"
    monkeypatch.setattr(Cached, "begin", lambda self, batch: None)
    theirs = train(name, loaded, data, world, tmp_path / "serial", features)
    assert last_weights(ours).read_bytes() == last_weights(theirs).read_bytes()
    assert (ours / "loss").read_text() == (theirs / "loss").read_text()


def test_training_step_reads_device_after_its_gradients_and_logs_a_step_late(
    loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step's batches are counted, and the last step's figures read, while a GPU would compute the gradients."""
    seen, owners = list[str](), {"backward": TrainingEngine, "step": TrainingEngine, "ahead": Batches, "read": ToHost}
    for name, owner in owners.items():
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *now, own=own, name=name, **more: seen.append(name) or own(*now, **more))
    train("medusa", loaded, data, world, tmp_path / "run", None)
    gradients, optimiser = ["backward"] * 2 + ["ahead"], ["step", "read"]
    assert seen == [*gradients, *optimiser] + [*gradients, "read", *optimiser] * (OPTIONS.steps - 1) + ["read"]


def test_cached_states_reader_thread_ends_when_training_is_interrupted(
    loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path
) -> None:
    features, _ = cached("medusa", loaded, data, world, tmp_path)
    shape = asdict(families()["medusa"].options(**SHAPES["medusa"]))
    job = TrainingJob(
        loaded, build("medusa", loaded.target), "medusa", shape, data, OPTIONS, DeepSpeedOptions(), LossOptions(), 4
    )
    trainer = Trainer(replace(job, features=features), world, tmp_path / "run")
    asked: Any = SimpleNamespace(requested=True)
    with pytest.raises(Interrupted):
        trainer.train(None, Console(None), asked)
    assert not [t for t in threading.enumerate() if t.name.startswith("features")]


def _must_not_run(*_: object) -> None:
    raise AssertionError("a block of the target ran")


def test_cached_states_float8_or_top_k_loss_stays_near_exact(
    loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    exact = float((train("eagle3", loaded, data, world, tmp_path / "online", None) / "loss").read_text())
    cases: tuple[tuple[dict[str, object], float], ...] = (
        ({"format": "float8"}, 0.02),
        ({"distribution": "top_k", "k": 56}, 0.03),
    )
    for options, error in cases:
        with subtests.test(options=options):
            folder = tmp_path / "-".join(options)
            features, said = cached("eagle3", loaded, data, world, folder / "features", **options)
            assert ("top 56 tokens:" in said) == ("distribution" in options)
            found = float((train("eagle3", loaded, data, world, folder / "run", features) / "loss").read_text())
            assert found == pytest.approx(exact, rel=error) and found != exact
            assert found < exact or "distribution" not in options, "other tokens as one outcome: never a larger divergence"


def test_cached_states_are_reused_and_damaged_shards_recomputed(
    loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, said = cached("medusa", loaded, data, world, tmp_path)
    store, files = features.store, sorted(features.store.folder.glob("*.safetensors"))
    assert len(files) == len(store.numbers) > 3 and "tokens/s" in said
    contents = [file.read_bytes() for file in files]
    files[0].write_bytes(contents[0][:-1])
    flipped = bytearray(contents[1])
    flipped[-5] ^= 1
    files[1].write_bytes(flipped)
    files[2].unlink()
    _, said = cached("medusa", loaded, data, world, tmp_path)
    assert f"features: {sum(map(store.layout.tokens, (0, 1, 2))):,} tokens" in said, "whole shards were computed again"
    assert f"{files[0]} is damaged ({len(contents[0]) - 1:,} bytes" in said and f"{files[1]} is damaged (sha256" in said
    assert str(files[2]) not in said and [file.read_bytes() for file in files] == contents
    for layer in loaded.target.backbone.module.layers:
        monkeypatch.setattr(layer, "forward", _must_not_run)
    again, said = cached("medusa", loaded, data, world, tmp_path)
    assert again.store.folder == store.folder and "tokens/s" not in said and "training reads them" in said


def test_cached_states_without_confirmation_or_disk_space_are_refused(
    loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "features"
    with pytest.raises(UserError, match=r"more than features.confirm_above=1e-06; add features.yes=true"):
        cached("medusa", loaded, data, world, root, confirm_above=1e-6)
    assert not root.exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        UserError, match=r"the target's states need 0.00 GiB, but .* has only 0.00 GiB free; set features.format=float8"
    ):
        cached("medusa", loaded, data, world, root, yes=True)
    assert not root.exists()
    monkeypatch.undo()
    cached("medusa", loaded, data, world, root, confirm_above=1e-6, yes=True)
    assert list(root.glob("*/index.json"))


def test_cached_states_above_size_limit_ask_for_confirmation(
    loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caching = Caching(
        FeatureOptions("cached", confirm_above=1e-6), loaded, build("medusa", loaded.target).taps, tmp_path / "f", 2
    )
    console = Console(RichConsole(file=StringIO(), force_terminal=True))
    monkeypatch.setattr("sys.stdin", _Terminal("n\n"))
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    with pytest.raises(UserError, match="you did not agree"):
        caching.features(data, world, console)
    assert not (tmp_path / "f").exists()
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert caching.features(data, world, console).store.file(0).exists()


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_check_features_unsupported_cached_options_are_refused(loaded: LoadedTarget) -> None:
    medusa, lookup = build("medusa", loaded.target), build("prompt_lookup", loaded.target)
    options = FeatureOptions("cached")
    for drafter, features, train_options, says in [
        (lookup, options, OPTIONS, "this drafter trains nothing; set features=online"),
        (medusa, options, replace(OPTIONS, on_policy=0.5), "train.on_policy writes new replies"),
        (medusa, replace(options, distribution="top_k", k=8), OPTIONS, "stores no final state, but this drafter reads it"),
        (medusa, replace(options, distribution="top_k", k=64), OPTIONS, "features.k is 64, the target has 64 tokens"),
    ]:
        with pytest.raises(UserError, match=says):
            check_features(features, drafter, train_options, loaded.target.shape.vocab_size)
    check_features(FeatureOptions(), lookup, OPTIONS, 64)


@pytest.mark.slow
@pytest.mark.sampled(recipe=["eagle3"], stage=[3])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("recipe", FAMILIES)
def test_cached_states_two_processes_equal_one_process_online(recipe: str, stage: int, material: Path, tmp_path: Path) -> None:
    steps = (*by_adamw(recipe), "train.steps=20", "train.checkpoint_every=20")
    one = once(material, *steps)
    both = (*steps, "features=cached", "features.format=float32", "launcher.nproc=2", f"deepspeed=zero{stage}")
    two = fit(material, tmp_path / "two", *both)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    a, b = load_file(last_weights(one)), load_file(last_weights(two))
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_cached_states_of_first_run_are_reused_by_second_run(material: Path, tmp_path: Path) -> None:
    command = arguments(material, tmp_path, "recipe=medusa", "train.steps=2", "features=cached", "launcher.nproc=2")
    said = [forked.run(command) for _ in range(2)]
    assert "bytes each" in said[0] and "bytes each" not in said[1] and all("training reads them" in text for text in said)
    refused = forked.start([*command, "features.format=float32", "features.confirm_above=0"])
    assert refused.wait() == 2 and "add features.yes=true" in refused.said()
    assert len(list((tmp_path / "features").iterdir())) == 1
