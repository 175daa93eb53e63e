"""Where the frozen target's weights lie changes nothing: losses of two processes whose target is spread or split over them."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from drafttrain.commands.fit import fit
from drafttrain.data import DataOptions
from drafttrain.data.dataset import load_dataset
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.measure import DecodeOptions, MeasureOptions
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import Taps
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.runs import placement as placing
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import LoadedTarget, load_target
from drafttrain.targets.split import RoundRobinTarget, ShardedTarget, part_among_neighbours
from drafttrain.train import DeepSpeedOptions, LoggerOptions, TrainOptions
from drafttrain.train.engine import TrainingEngine, World, join_world, leave_world
from drafttrain.train.job import TrainingJob
from drafttrain.train.progress import Console
from drafttrain.train.sharding import ZeroShards
from drafttrain.train.trainer import Trainer
from tests.forked import launch
from tests.helpers import tiny_model
from tests.integration import test_training as runs
from tests.reports import counted
from tests.unit.targets.test_placement import packed_batch

PLACEMENTS = ("replicated", "zero3", "tensor_parallel")
CASES: dict[str, tuple[str, dict[str, Any], int]] = {  # family, options, ZeRO stage of the drafter
    "heads": ("medusa", {"heads": 2, "paths": [[0], [1], [0, 0]]}, 0),
    "unrolled": ("eagle3", {"target_layer_ids": [0, 1, 3], "steps": 2, "draft_length": 2}, 3),
    "model": ("draft_model", {"source": "scratch", "blocks": 2, "draft_length": 2}, 2),
}
TRAIN = TrainOptions(steps=3, global_batch=8, micro_batch=2, warmup=0.0, checkpoint_every=3)
Found = dict[str, Any]


class Watched(deepspeed.zero.GatheredParameters):  # type: ignore[misc]
    """Notes how many parameters are whole at once outside the forward pass."""

    most = 0

    def __init__(self, params: Any, **more: Any) -> None:
        params = list(params) if isinstance(params, list | tuple) else [params]
        Watched.most = max(Watched.most, sum(getattr(p, "ds_numel", 0) for p in params))
        super().__init__(params, **more)


def loaded_as(placement: str, path: str) -> LoadedTarget:
    options = TargetOptions(name="hf", path=path)
    if placement == "zero3":
        return load_target(options, shards=ZeroShards(torch.float32))
    if placement == "tensor_parallel":
        return load_target(options, part_among_neighbours(2), kind=RoundRobinTarget)
    return load_target(options)


def watch_blocks(loaded: LoadedTarget, found: Found) -> None:
    """Of the blocks' weights, how many are there while each of them computes."""
    blocks = loaded.target.backbone.module.layers

    def note(*_: Any) -> None:
        found["blocks"] = max(found.get("blocks", 0), sum(p.numel() for p in blocks.parameters()))

    for block in blocks:
        block.register_forward_pre_hook(note)
    found["shards"] = sum(getattr(p, "ds_tensor", p).numel() for p in blocks.parameters())


def trained(loaded: LoadedTarget, case: str, world: World, run: Path, data: str) -> list[float]:
    """The loss of every step."""
    family, shape, stage = CASES[case]
    torch.manual_seed(1)
    options = families()[family].options(**shape)
    drafter = families()[family].build(options, loaded.target)
    dataset = load_dataset(DataOptions(path=data, held_out=2), loaded.tokenizer, progress=False)
    stages = DeepSpeedOptions(zero_stage=stage)
    job = TrainingJob(loaded, drafter, family, asdict(options), dataset, TRAIN, stages, LossOptions(), 4)
    trainer, losses = Trainer(job, world, run / case), list[Any]()
    step = trainer._step
    trainer._step = lambda *now: losses.append(step(*now)) or losses[-1]  # type: ignore[method-assign]
    trainer.train(None, Console(None))
    return [taken.values()["loss"] for taken in losses]


def reductions(target: Any, batch: TrainBatch, stage: int, world: World) -> list[int]:
    """How many all-reduces each of three micro-batches of one step asks for."""
    drafter = families()["medusa"].build(families()["medusa"].options(heads=1), target)
    train = TrainOptions(global_batch=3 * 2 * world.size, micro_batch=2)
    engine, asked = (
        TrainingEngine(Objective(drafter, target, LossOptions()), train, DeepSpeedOptions(zero_stage=stage), world),
        [0],
    )
    reduce = distributed.all_reduce

    def counted(*tensors: Any, **more: Any) -> Any:
        asked[-1] += 1
        return reduce(*tensors, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_reduce", counted)
        for last in (False, False, True):
            loss, _ = engine.forward(batch, 0.0)
            engine.backward(loss, 100)
            if last:
                engine.step(0.0)
            else:
                engine.micro_done()
                asked.append(0)
    return asked


def asked(batch: TrainBatch) -> tuple[torch.Tensor, ...]:
    return batch.token_BT, batch.position_BT, batch.document_BT, batch.mask_BT


def train_everywhere(options: RunOptions, resolved: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    world, folder = join_world(torch.device("cpu")), Path(resolved["folder"])
    found: dict[str, Found] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.zero, "GatheredParameters", Watched)
        for placement in PLACEMENTS:
            here: Found = {}
            Watched.most = 0
            loaded = loaded_as(placement, resolved["target"])
            here["loading"], here["fingerprint"] = Watched.most, loaded.target.fingerprint
            watch_blocks(loaded, here)
            batch = packed_batch() if world.first else TrainBatch(*(x[:1, :20] for x in asked(packed_batch())))
            states = Online(loaded.target, Taps((0, 2), final=True)).fill(batch).hidden
            here["states"] = {key: state.flatten().tolist() for key, state in states.items()}
            for case in CASES:
                here[case] = trained(loaded, case, world, folder / placement, resolved["data"])
            if placement == "zero3":
                copied = loaded.target.pruned(2)
                here["copied"] = sum(p.numel() for p in copied.parameters())
                loaded.target.free()
                here["left"] = sum(
                    getattr(p, "ds_tensor", p).numel() for p in loaded.target.backbone.module.layers.parameters()
                )
            if placement == "replicated":
                filled = Online(loaded.target, Taps(final=True)).fill(packed_batch())
                here["reductions"] = [reductions(loaded.target, filled, stage, world) for stage in range(3)]
            found[placement] = here
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    leave_world(world)


@pytest.fixture(scope="module")
def both(material: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("placements")
    paths = {"target": str(material / "target"), "data": str(material / "data.jsonl"), "folder": str(folder)}
    launch(train_everywhere, RunOptions(launcher=LauncherOptions(nproc=2)), paths)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("placement", PLACEMENTS[1:])
def test_target_placement_losses_equal_replicated_target(placement: str, case: str, both: list[dict[str, Found]]) -> None:
    for found in both:
        assert len(found[placement][case]) == TRAIN.steps
        assert found[placement][case] == pytest.approx(found["replicated"][case], rel=1e-5)
        assert found[placement]["fingerprint"] == found["replicated"]["fingerprint"]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS[1:])
def test_target_placement_uneven_batches_states_equal_replicated(placement: str, both: list[dict[str, Found]]) -> None:
    """One process has two rows of 48 tokens, one of them of two documents; the other a single row of 20."""
    assert [len(found["replicated"]["states"]["0"]) for found in both] == [2 * 48 * 32, 20 * 32]
    for found in both:
        for key, states in found["replicated"]["states"].items():
            assert found[placement]["states"][key] == pytest.approx(states, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_zero3_target_is_never_whole_in_one_process(material: Path, both: list[dict[str, Found]]) -> None:
    """Neither while it is read, parameter by parameter, nor while it computes; and what is freed is gone."""
    model: Any = load_target(TargetOptions(name="hf", path=str(material / "target"))).target.model
    blocks = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    vectors = sum(p.numel() for p in model.model.layers.parameters() if p.ndim < 2)
    for found in (f["zero3"] for f in both):
        assert found["loading"] <= max(*blocks, model.lm_head.weight.numel())
        assert found["shards"] == sum(blocks) // 2 and found["left"] == 0
        assert vectors <= found["blocks"] < sum(blocks)
        outside = sum(p.numel() for p in model.parameters()) - sum(blocks)
        assert found["copied"] == outside + sum(blocks[:2])


def fit_with_little_memory(options: RunOptions, resolved: dict[str, Any]) -> None:
    """`fit` on processes that could hold the target together, and not alone."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "free_bytes", lambda device, neighbours: resolved["free"])
        fit(options, resolved)


def options_of(output: Path, placement: str) -> RunOptions:
    shape = families()["medusa"].options(heads=2, paths=[[0], [1], [0, 0]])
    return RunOptions(
        target=TargetOptions(placement=placement),
        drafter=shape,
        data=DataOptions(held_out=2, max_length=64),
        train=TrainOptions(steps=2, global_batch=4, micro_batch=2, checkpoint_every=2),
        loss=LossOptions(chunk=64),
        decode=DecodeOptions(max_new_tokens=12, tree_nodes=3),
        measure=MeasureOptions(limit=2, repeats=1, timed_prompts=1, batch_sizes=[1], untimed_batch=2, tune=False),
        logger=LoggerOptions(name="none"),
        launcher=LauncherOptions(nproc=2),
        output=str(output),
    )


@pytest.mark.slow
def test_zero_stages_0_and_1_reduce_gradients_once_per_step(both: list[dict[str, Found]]) -> None:
    """From ZeRO stage 2 on a process keeps its share of the gradients alone, and so reduces after every micro-batch."""
    for found in both:
        whole, optimizer, sharded = found["replicated"]["reductions"]
        assert all(first == second == 0 < last for first, second, last in (whole, optimizer))
        assert all(count > 0 for count in sharded)


def reported(output: Path, placement: str, free: int) -> dict[str, Any]:
    launch(fit_with_little_memory, options_of(output, placement), {"free": free})
    (file,) = output.glob("*/*/report.json")
    assert json.loads((file.parent / "run.json").read_text())["finished"]
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reported(tmp_path_factory.mktemp("alone"), "replicated", 10**9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "free", "shared_by"),
    [
        pytest.param("zero3", 10**9, 1, marks=pytest.mark.grid),
        ("zero3", 10**7, 2),
        pytest.param("tensor_parallel", 10**9, 1, marks=pytest.mark.grid),
    ],
)
def test_fit_sharded_target_is_measured_whole_if_memory_allows(
    placement: str, free: int, shared_by: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    shared = reported(tmp_path, placement, free)
    assert shared["target"]["tensor_parallel"] == shared_by
    assert counted(shared["checkpoints"][0]) == counted(alone["checkpoints"][0])


STEPS = (*runs.by_adamw("eagle3"), "train.steps=12", "train.checkpoint_every=4", "launcher.nproc=2", "train.log_every=4")


STATES = [  # in make test-slow: everything on the host, and everything sharded
    ("train.optimizer=muon", "deepspeed=zero3", "deepspeed.offload_optimizer=true", "deepspeed.offload_parameters=true"),
    ("train.activation_checkpointing=true", "target.prefetch=true", "deepspeed=zero3", "target.placement=zero3"),
]


@pytest.mark.slow
@pytest.mark.sampled(more=STATES)
@pytest.mark.parametrize(
    "more",
    [
        ("deepspeed=zero2", "deepspeed.offload_optimizer=true"),
        ("train.optimizer=muon",),
        ("train.optimizer=muon", "train.precision=bfloat16", "deepspeed=zero2"),
        ("deepspeed=zero3", "deepspeed.offload_optimizer=true", "deepspeed.offload_parameters=true"),
        *STATES,
    ],
    ids=lambda more: f"{more[0]}-{more[-1]}",
)
def test_offload_and_optimizer_settings_keep_losses_and_resume_exactly(
    more: tuple[str, ...], material: Path, tmp_path: Path
) -> None:
    whole = runs.fit(material, tmp_path / "whole", *STEPS, *more)
    if "train.optimizer=muon" not in more:
        assert runs.losses(whole) == pytest.approx(runs.losses(runs.once(material, *STEPS)), rel=1e-5)
    broken = tmp_path / "broken"
    runs.kill_after(runs.arguments(material, broken, *STEPS, *more, "resume=auto"), broken, lines=6)
    assert runs.digest(runs.fit(material, broken, *STEPS, *more, "resume=auto")) == runs.digest(whole)


SPREAD = dict.fromkeys(("gpt2", "opt", "falcon", "gemma3-sliding"), torch.float32) | {"qwen3": torch.bfloat16}


def spread_architectures(options: RunOptions, resolved: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    world, folder = join_world(torch.device("cpu")), Path(resolved["folder"])
    for name, dtype in SPREAD.items():
        if world.first:
            tiny_model(name).save_pretrained(folder / name)
        world.wait()
        read = partial(AutoModelForCausalLM.from_pretrained, folder / name, dtype=dtype, use_safetensors=True)
        shards = ZeroShards(dtype)
        with shards.loading():
            model = read()
        spread, whole = ShardedTarget(model, shards), HFTarget(read())
        assert (spread.trees, spread.fingerprint, spread.dtype) == (whole.trees, whole.fingerprint, dtype)
        generator = torch.Generator().manual_seed(world.rank)
        for length in (5, 12 + world.rank, 9):
            token_BT = torch.randint(0, 64, (2, length), generator=generator)
            inputs = (token_BT, None, None, torch.arange(length).expand(2, -1), Taps((0, 2), final=True))
            with torch.no_grad():
                ours, theirs = (target(*inputs) for target in (spread, whole))
                assert torch.equal(spread.embed(token_BT), whole.embed(token_BT))
            assert torch.equal(ours.logits_BRV, theirs.logits_BRV)
            assert all(torch.equal(ours.hidden[key], state) for key, state in theirs.hidden.items())
    leave_world(world)


@pytest.mark.slow
def test_zero3_sharded_architectures_logits_equal_whole_target_bitwise(tmp_path: Path) -> None:
    """To the bit: the assertions are made in each of two processes."""
    launch(spread_architectures, RunOptions(launcher=LauncherOptions(nproc=2)), {"folder": str(tmp_path)})
