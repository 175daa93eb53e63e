"""`features.target=ends`: training without the target's blocks, with the weights, records and checks of the whole target."""

from __future__ import annotations

import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console as RichConsole
from safetensors.torch import load_file, save_file

from drafttrain.cli.config import compose_run
from drafttrain.core.errors import UserError
from drafttrain.data.dataset import Dataset
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import TargetRecord, load_drafter, read_meta
from drafttrain.features import FeatureOptions
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.losses import LossOptions
from drafttrain.runs.options import check_target
from drafttrain.targets import TargetOptions
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.frozen_ends import LoadedEnds, load_ends
from drafttrain.targets.load import LoadedTarget, load_target
from drafttrain.targets.pieces import Pieces
from drafttrain.targets.quantised import is_quantised
from drafttrain.train import DeepSpeedOptions, streamed_states
from drafttrain.train.engine import World, join_world
from drafttrain.train.engine_features import EngineFeatures
from drafttrain.train.job import TrainingJob
from drafttrain.train.progress import Console
from drafttrain.train.streamed_states import StreamedStates
from drafttrain.train.trainer import Trainer
from tests import forked
from tests.architectures import ROWS, Architecture, model_of
from tests.contract.test_families import SHAPES
from tests.helpers import share_compiled
from tests.integration.test_engine_features import OPTIONS, computed
from tests.integration.test_engine_in_training import engine, engine_lines
from tests.integration.test_features import data, loaded
from tests.integration.test_training import arguments, digest, fit, kill_after, last_weights, losses, once
from tests.standin.served import States
from tests.standin.states_server import StandIn, serving
from tests.tokenizers import save_bytes_tokenizer
from tests.unit.targets import test_fp8_checkpoints as fp8_checkpoints
from tests.unit.targets.test_quantised_checkpoints import FP8, fp8, saved

__all__ = ["data", "engine", "loaded"]
FAMILIES = ("medusa", "eagle3", "dflash")
# in make test-slow: another prefix, inputs by layer, experts in one tensor and apart, blocks below a composite model's prefix,
# recurrence, Falcon-H1, which is refused, and several states of each position, without a cache
PIECES = ("Llama", "GPT-2", "Gemma-4 (text)", "gpt-oss", "DeepSeek-V3", "Qwen3-VL", "Qwen3-Next", "Falcon-H1", "DeepSeek-V4")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    share_compiled(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drafttrain" / "targets"


@pytest.fixture(scope="module")
def world() -> World:
    return join_world(torch.device("cpu"))


def ends_of(material: Path, **options: Any) -> LoadedEnds:
    return load_ends(TargetOptions(name="hf", path=str(material / "target"), **options))


def trained(name: str, loaded: LoadedTarget, data: Dataset, world: World, folder: Path, url: str) -> tuple[Path, str]:
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


@pytest.mark.sampled(name=["eagle3"])
@pytest.mark.parametrize("name", FAMILIES)
def test_target_ends_training_equals_whole_target(
    name: str, material: Path, loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path
) -> None:
    ends = ends_of(material)
    StreamedStates(ends, 64).learn(world, Console(None))
    drafter = families()[name].build(families()[name].options(**SHAPES[name]), loaded.target)
    layers = EngineFeatures(FeatureOptions("engine"), loaded, drafter.taps, 64).layers.ids
    with serving(StandIn(computed(loaded, layers), tmp_path / "states")) as url:
        whole, _ = trained(name, loaded, data, world, tmp_path / "whole", url)
        alone, said = trained(name, ends.loaded, data, world, tmp_path / "ends", url)
    assert "1 of 1 servers (vllm 0.32.0) give the target's states" in said
    assert last_weights(alone).read_bytes() == last_weights(whole).read_bytes()
    records = [read_meta(last_weights(folder).parent) for folder in (alone, whole)]
    assert records[0] == records[1] and records[0].target.fingerprint == loaded.target.fingerprint
    assert load_drafter(last_weights(alone).parent, loaded.target)[1].family == name


def test_target_ends_blocks_are_not_in_memory(material: Path, loaded: LoadedTarget) -> None:
    ends = ends_of(material)
    blocks = ends.target.model.get_submodule(ends.pieces.prefix)
    assert len(blocks) == loaded.target.shape.blocks and all(p.is_meta for p in blocks.parameters())
    here = [p for p in ends.target.model.parameters() if not p.is_meta]
    shape = loaded.target.shape
    assert sum(p.numel() for p in here) == 2 * shape.vocab_size * shape.hidden_size + shape.hidden_size
    assert ends.target.own_bytes == 4 * sum(p.numel() for p in here)
    assert ends.loaded.description["parameters"] == sum(p.numel() for p in loaded.target.model.parameters())


def test_target_ends_compute_states_with_one_block_in_memory(
    material: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []
    most, real = [], Pieces.block

    def block(pieces: Pieces, number: int) -> Any:
        found = real(pieces, number)
        alive.extend(weakref.ref(p) for p in found.parameters())
        most.append(sum(p is not None for p in (ref() for ref in alive)) / len(list(found.parameters())))
        return found

    ends = ends_of(material)
    monkeypatch.setattr(Pieces, "block", block)
    StreamedStates(ends, 64).learn(world, Console(None))
    assert most == [1.0] * ends.target.shape.blocks


def test_target_ends_states_and_fingerprint_equal_whole_target(material: Path, loaded: LoadedTarget, world: World) -> None:
    ends = ends_of(material)
    StreamedStates(ends, 64).learn(world, Console(None))
    known = ends.target.known
    assert known is not None and len(known.ids) == 64 and known.wrong_tap is None
    token_1T, blocks = torch.tensor([known.ids]), range(loaded.target.shape.blocks)
    position_1T = torch.arange(64)[None]
    whole = loaded.target(token_1T, None, None, position_1T, Taps(tuple(blocks), final=True), token_1T[:, :0]).hidden
    own = ends.target(token_1T, None, None, position_1T, Taps(tuple(blocks), final=True), token_1T[:, :0]).hidden
    for key in (*blocks, FINAL):
        torch.testing.assert_close(own[key], whole[key], atol=1e-5, rtol=1e-5)
    assert ends.target.fingerprint == ends.loaded.description["fingerprint"] == loaded.target.fingerprint
    assert TargetRecord.of(ends.loaded) == TargetRecord.of(loaded)


def test_target_ends_states_are_cached_and_recomputed_when_damaged(
    material: Path, world: World, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(material, world)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    learn(material, world)
    assert file.read_bytes() == content, "a damaged file is made again"
    monkeypatch.setattr(streamed_states, "stream", None)
    assert learn(material, world).target.known is not None
    shutil.copytree(material / "target", cache / "other")
    os.utime(cache / "other" / "model.safetensors")
    with pytest.raises(UserError, match=r"could not be run block by block: TypeError"):
        StreamedStates(load_ends(TargetOptions(name="hf", path=str(cache / "other"))), 64).learn(world, Console(None))


def learn(material: Path, world: World) -> LoadedEnds:
    ends = ends_of(material)
    StreamedStates(ends, 64).learn(world, Console(None))
    return ends


def test_target_ends_server_states_of_wrong_layers_are_refused(
    material: Path, loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path
) -> None:
    ends = learn(material, world)
    layers = EngineFeatures(FeatureOptions("engine"), ends.loaded, Taps((0,)), 64).layers.ids
    with serving(StandIn(computed(loaded, tuple(i + 1 for i in layers[:-1]) + layers[-1:]), tmp_path / "states")) as url:
        features = EngineFeatures(FeatureOptions("engine", servers=["x"]), ends.loaded, Taps((0,)), 64)
        with pytest.raises(UserError, match=r"the state of layer id 1 differs .*; it is the state of layer id 2"):
            features.features(data, [url], None, "", world, Console(None))


def test_target_ends_family_that_needs_blocks_is_refused(material: Path, subtests: pytest.Subtests) -> None:
    target = ends_of(material).target
    for name in ("draft_model", "early_exit", "uno"):
        with (
            subtests.test(name=name),
            pytest.raises(UserError, match=r"^features.target=ends loads no blocks of the target, but [^\n]*$"),
        ):
            families()[name].build(families()[name].options(**SHAPES[name]), target)


NEEDS_BLOCKS = [
    (["features=online"], "features.target is ends, but features=online runs the target's blocks"),
    (["target.weights=int8"], "target.weights=int8 quantises the blocks in the trainer"),
    (["target.placement=zero3"], "target.placement=zero3 divides the blocks among processes"),
    (["target.expert_parallel=2"], "target.expert_parallel=2 divides the blocks among processes"),
    (["measure.every=10"], "set measure.engine=vllm too"),
    (["measure.every=10", "measure.engine=llamacpp"], "measure.engine is llamacpp, for which the trainer writes"),
]


@pytest.mark.usefixtures("command")  # composes quickly
def test_target_ends_incompatible_options_are_refused_before_loading(subtests: pytest.Subtests) -> None:
    for words, line in NEEDS_BLOCKS:
        options = compose_run("medusa", ["features=engine", "features.target=ends", *words]).options
        with subtests.test(words=words), pytest.raises(UserError, match=line):
            check_target(options, in_memory=False)


def test_target_ends_tied_embeddings_in_shards_read_only_needed_files(tmp_path: Path, world: World) -> None:
    """Only the files with the ends and the first block are read at the start."""
    save_bytes_tokenizer(tmp_path / "target")
    model = model_of("Llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "target", max_shard_size="100KB")
    assert (tmp_path / "target" / "model.safetensors.index.json").is_file()
    whole = load_target(TargetOptions(name="hf", path=str(tmp_path / "target")))
    ends = ends_of(tmp_path)
    assert ends.target.model.get_output_embeddings().weight is ends.target.model.get_input_embeddings().weight
    assert not [name for name in ends.pieces.files.read if ".layers." in name and ".layers.0." not in name]
    StreamedStates(ends, 64).learn(world, Console(None))
    assert ends.target.fingerprint == whole.target.fingerprint


def test_target_ends_unknown_or_missing_weights_are_named(tmp_path: Path, world: World) -> None:
    save_bytes_tokenizer(tmp_path / "target")
    model_of("Llama").save_pretrained(tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.layers.1.mlp.odd.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"they have and it does not know model\.layers\.1\.mlp\.odd\.weight"):
        learn(tmp_path, world)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"they lack model\.layers\.2\.mlp\.up_proj\.weight"):
        learn(tmp_path, world)


@pytest.mark.slow
@pytest.mark.sampled(row=[row for row in ROWS if row.name in PIECES])
@pytest.mark.parametrize("row", [row for row in ROWS if not row.refused or row.recomputed], ids=lambda row: row.name)
def test_target_ends_architecture_states_equal_whole_target(row: Architecture, tmp_path: Path, world: World) -> None:
    """The same fingerprint, the same kind of drafts and nearly the same states as the whole target."""
    save_bytes_tokenizer(tmp_path / "target")
    model_of(row.name).save_pretrained(tmp_path / "target")
    if row.name == "Falcon-H1":  # its weights are initialised by a loop over all blocks
        with pytest.raises(UserError, match=r"could not be loaded in pieces: .*; set features.target=whole"):
            ends_of(tmp_path)
        return
    whole, ends = load_target(TargetOptions(name="hf", path=str(tmp_path / "target"))).target, learn(tmp_path, world).target
    assert ends.fingerprint == whole.fingerprint and ends.known is not None
    assert (ends.trees, isinstance(ends, FastTarget)) == (whole.trees, isinstance(whole, FastTarget))
    token_1T, last = torch.tensor([ends.known.ids]), whole.shape.blocks - 1
    position_1T = torch.arange(token_1T.shape[1])[None]
    taps = Taps((0, last) if whole.wrong_tap is None else (), final=True)
    if whole.wrong_tap is not None:
        assert ends.wrong_tap is not None
    found, expected = (t(token_1T, None, None, position_1T, taps, token_1T[:, :0]).hidden for t in (ends, whole))
    for key in taps.keys:
        torch.testing.assert_close(found[key], expected[key], atol=1e-4, rtol=1e-3)
    if ends.wrong_tap == 0:  # an engine that gives the final state itself can be compared, one that gives blocks cannot
        loaded, ids = LoadedTarget(ends, ends.tokenizer, "", {}), np.array(ends.known.ids, np.int32)
        final = EngineFeatures(FeatureOptions("engine", engine="sglang"), loaded, Taps(), 64)._compared(ids)[1]
        torch.testing.assert_close(final, found[FINAL][0])
        with pytest.raises(UserError, match=r"choose a drafter that reads the target's last state alone"):
            EngineFeatures(FeatureOptions("engine"), loaded, Taps(), 64)._compared(ids)


@pytest.mark.slow
def test_target_ends_fp8_checkpoint_fingerprint_equals_whole_target(tmp_path: Path, world: World) -> None:
    save_bytes_tokenizer(tmp_path / "target")
    model = model_of("Llama")
    weights = saved(tmp_path / "target", model, FP8)
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            small, scale, _ = fp8(linear.weight.detach())
            weights |= {f"{name}.weight": small, f"{name}.weight_scale_inv": scale}
    save_file(weights, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    whole = load_target(TargetOptions(name="hf", path=str(tmp_path / "target")))
    assert learn(tmp_path, world).target.fingerprint == whole.target.fingerprint


@pytest.mark.slow
def test_target_ends_fp8_blocks_of_fast_runner_have_fingerprint_of_whole_target(tmp_path: Path, world: World) -> None:
    fp8_checkpoints.saved(tmp_path / "target", "Llama", "block", fp8_checkpoints.BLOCKS)
    whole = load_target(TargetOptions(name="hf", path=str(tmp_path / "target")))
    assert is_quantised(whole.target.model) and learn(tmp_path, world).target.fingerprint == whole.target.fingerprint


@pytest.mark.slow
def test_target_ends_and_whole_target_runs_resume_each_other(material: Path, states: States, tmp_path: Path) -> None:
    whole, broken = once(material, *states.asked()), tmp_path / "broken"
    for lines, target in ((2, "ends"), (7, "whole")):
        kill_after(arguments(material, broken, *states.asked("resume=auto", f"features.target={target}")), broken, lines)
    run = fit(material, broken, *states.asked("resume=auto", "features.target=ends"))
    two = fit(material, tmp_path / "two", *states.asked("features.target=ends", "launcher.nproc=2"))
    assert len(list(broken.glob("*/*/run.json"))) == 1, "resume=auto began a new run"
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
    assert losses(two) == pytest.approx(losses(whole), rel=1e-5)
    assert read_meta(last_weights(run).parent) == read_meta(last_weights(whole).parent)
    assert (last_weights(run).parent / "golden.safetensors").is_file()
    place = f"target.path={material / 'target'}"
    command = [sys.executable, "-m", "drafttrain", "export", f"checkpoint={last_weights(run).parent}", "target=hf", place]
    forked.run([*command, "format=vllm", f"out={tmp_path / 'export'}"])


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
class FarConfig(LlamaConfig):
    model_type = "far"
class FarModel(LlamaModel):
    config_class = FarConfig
    def forward(self, *args, **kwargs):
        if kwargs.get("past_key_values") is not None:
            raise ValueError("its cache is its engine's")
        return super().forward(*args, **kwargs)
class FarForCausalLM(LlamaForCausalLM):
    config_class = FarConfig
    def __init__(self, config):
        super().__init__(config)
        self.model = FarModel(config)
        self.post_init()
"""


@pytest.mark.slow
def test_target_ends_of_architecture_that_only_its_engine_decodes_train_as_known_one(
    material: Path, states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers lacks it; the code that comes with the checkpoint computes states, and takes no cache of ours."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    far = tmp_path / "far"
    shutil.copytree(material, far, ignore=shutil.ignore_patterns("runs"))
    (far / "target" / "far.py").write_text(CODE)
    named = {"AutoConfig": "far.FarConfig", "AutoModelForCausalLM": "far.FarForCausalLM"}
    config = json.loads((far / "target" / "config.json").read_text()) | {"model_type": "far", "auto_map": named}
    (far / "target" / "config.json").write_text(json.dumps(config))
    asked = states.asked("features.target=ends", "target.trust_remote_code=true")
    said = forked.run(arguments(far, tmp_path / "out", *asked))
    assert "so drafts are chains: each step computes the text anew, because FarForCausalLM cannot decode with our KV" in said
    (run,) = (tmp_path / "out").glob("*/*")
    assert losses(run) == pytest.approx(losses(once(material, *states.asked())), rel=1e-5)


@pytest.mark.slow
def test_target_ends_run_is_measured_by_engine_during_training(
    material: Path, states: States, tmp_path: Path, engine: Callable[[str], tuple[str, ...]]
) -> None:
    run = fit(material, tmp_path / "out", *states.asked("features.target=ends", "measure.best=engine", *engine("fast")))
    lines = {line["engine/step"]: line for line in engine_lines(run)}
    assert 3 in lines and 12 in lines and all(line["engine/own_tau"] is None for line in lines.values())
