"""A target that is trained with its drafter: the loop, its checkpoints, and going on from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset
from drafttrain.drafters.checkpoint import list_checkpoints, load_checkpoint, read_weights
from drafttrain.drafters.medusa import Medusa, MedusaOptions
from drafttrain.model.lora import LoraSpec
from drafttrain.objective.losses import LossOptions
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import join_world
from drafttrain.train.job import TrainingJob
from drafttrain.train.progress import Console
from drafttrain.train.trainer import Trainer
from tests.helpers import tiny_target
from tests.integration.test_training import arguments, digest, fit, kill_after, losses, once

SPEC = LoraSpec(rank=4, start=0.34, ramp=False, drafter_weight=0.3)
SHORT = ("measure.minutes=0", "measure.tune=off", "measure.limit=2", "measure.batch_sizes=[1]", "decode.max_new_tokens=6")


class NoWords:
    pad_token_id = 0


def job(stage: int = 0, spec: LoraSpec = SPEC, **more: str) -> TrainingJob:
    generator = np.random.default_rng(0)
    rows = [Encoded(generator.integers(0, 64, 12 + i % 5).astype(np.int32), np.arange(12 + i % 5) > i % 4) for i in range(20)]
    torch.manual_seed(0)
    target, options = tiny_target(), MedusaOptions(heads=2, adapter=spec)
    about = {"name": "hf", "path": "nowhere", "revision": None, "dtype": "float32", "weights": None}
    train = TrainOptions(
        steps=6, global_batch=4, micro_batch=2, lr=5e-3, checkpoint_every=3, keep_last=5, weight_decay=0.1, **more
    )
    return TrainingJob(
        LoadedTarget(target, NoWords(), "nowhere", about),  # type: ignore[arg-type]
        Medusa(options, target),
        "medusa",
        asdict(options),
        Dataset(rows[:16], rows[16:], {}),
        train,
        DeepSpeedOptions(zero_stage=stage),
        LossOptions(),
        4,
        Adapter(target, spec),
    )


def trained(folder: Path, work: TrainingJob) -> dict[str, torch.Tensor]:
    Trainer(work, join_world(torch.device("cpu")), folder).train(None, Console(None))
    return read_weights(list_checkpoints(folder / "checkpoints")[-1])


# test_resharding.py has states of every stage
@pytest.mark.slow
@pytest.mark.sampled(stage=[1], optimizer=["muon"])
@pytest.mark.parametrize(("stage", "precision"), [(0, "float32"), (1, "float32"), (2, "float32"), (1, "bfloat16")])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_adapted_target_resumed_run_equals_uninterrupted_run(
    stage: int, precision: str, optimizer: str, tmp_path: Path
) -> None:
    """The third step is the first that trains the target: one checkpoint in the middle of its warm-up."""
    work = job(stage, precision=precision, optimizer=optimizer)
    original = [p.clone() for p in work.loaded.target.model.parameters()]
    whole = trained(tmp_path / "whole", work)
    assert all(torch.equal(a, b) for a, b in zip(original, work.loaded.target.model.parameters(), strict=True))
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-00006")
    again = trained(tmp_path / "broken", job(stage, precision=precision, optimizer=optimizer))
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    changed = [float(tensor.float().abs().sum()) for name, tensor in whole.items() if "lora_B" in name]
    assert len(changed) == 28 and all(changed), "every B has left zero"


@pytest.mark.slow
@pytest.mark.sampled(optimizer=["adamw"])  # test_muon.py has every stage
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_adapted_target_zero_stages_equal_stage_0_and_heads_train_first(optimizer: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "0", job(0, optimizer=optimizer))
    for stage in (1, 2):
        for name, tensor in trained(tmp_path / str(stage), job(stage, optimizer=optimizer)).items():
            torch.testing.assert_close(tensor, whole[name], atol=1e-5, rtol=1e-4)
    work = job(0, LoraSpec(rank=4, start=0.5), optimizer=optimizer)
    fresh = {name: tensor.clone() for name, tensor in work.adapter.state_dict().items()}  # type: ignore[union-attr]
    trained(tmp_path / "apart", work)
    early = read_weights(tmp_path / "apart" / "checkpoints" / "step-00003")
    assert all(torch.equal(tensor, early[f"adapter.{name}"]) for name, tensor in fresh.items())
    assert early["heads.0.blocks.0.linear.weight"].any()


def test_adapted_target_checkpoint_loads_logits_of_trained_target(tmp_path: Path) -> None:
    work = job()
    trained(tmp_path, work)
    assert work.adapter is not None
    restored = load_checkpoint(tmp_path / "checkpoints" / "step-00006", work.loaded)
    token_BT = torch.arange(12)[None]
    with torch.no_grad():
        (found, wanted, before) = (
            target.model(token_BT).logits for target in (restored.loaded.target, work.adapter.target, work.loaded.target)
        )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, before, atol=1e-2)


@pytest.fixture
def small(material: Path) -> tuple[str, ...]:
    """Arguments of a short `fit` with an adapter, which measures."""
    (material / "two.jsonl").write_text('{"question_id": 1, "turns": ["abc"]}\n{"question_id": 2, "turns": ["hello"]}\n')
    data = ("target=hf", f"target.path={material / 'target'}", f"data.path={material / 'data.jsonl'}", "data.held_out=2")
    steps = ("train.steps=2", "train.checkpoint_every=1", "train.global_batch=2", "train.micro_batch=2")
    return ("recipe=medusa2", *data, *steps, "logger=none", f"prompts={material / 'two.jsonl'}", *SHORT)


def test_fit_adapter_at_zero_3_is_refused_before_writing(
    small: tuple[str, ...], command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("fit", *small, "deepspeed=zero3") == 2
    assert "deepspeed.zero_stage is 3, but an adapter" in capsys.readouterr().err
    assert not list(Path("outputs").glob("*/*/checkpoints"))


@pytest.mark.slow
def test_adapted_target_commands_load_adapter_and_refuse_zero3(
    small: tuple[str, ...], command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """fit, which measures; measure by itself; generate."""
    assert command("fit", *small) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "adapter of the target: rank 32" in said and "NOT of the original" in said
    (run,) = [path.parent for path in Path("outputs").glob("medusa2/*/report.json")]
    entries = json.loads((run / "report.json").read_text())["checkpoints"]
    assert [e["name"] for e in entries] == ["step-00001", "step-00002"]
    assert all(e["exact_matches"] == 2 and e["target_change"]["perplexity"]["adapted"] for e in entries)
    checkpoint = f"checkpoint={run / 'checkpoints' / 'step-00002'}"
    assert command("measure", checkpoint, *small[-1 - len(SHORT) :]) == 0
    assert "NOT of the original" in " ".join(capsys.readouterr().out.split())
    assert command("generate", checkpoint, "prompt=abc", "decode.max_new_tokens=5") == 0
    assert "the output is that of the adapted target, not of the original" in capsys.readouterr().err


@pytest.mark.slow
def test_adapted_target_killed_run_resumes_and_two_processes_match_one(material: Path, tmp_path: Path) -> None:
    steps = ("recipe=medusa2", "train.steps=12", "train.checkpoint_every=4")
    whole = once(material, *steps)
    broken = tmp_path / "broken"
    kill_after(arguments(material, broken, *steps, "resume=auto"), broken, lines=6)
    assert digest(fit(material, broken, *steps, "resume=auto")) == digest(whole)
    for stage in (0, 2):
        two = fit(material, tmp_path / f"two-{stage}", *steps, "launcher.nproc=2", f"deepspeed=zero{stage}")
        assert losses(two) == pytest.approx(losses(whole), rel=1e-4)
