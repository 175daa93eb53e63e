"""`train.lora` through the commands: training continues by LoRA from a checkpoint, resumes, and is exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration.test_fit_errors import arguments, trained
from tests.integration.test_training import fit, last_weights, losses, once

Command = Callable[..., int]
RANK = ("train.lora.rank=2", "train.lora.alpha=8")


def apart(file: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, matrices)."""
    tensors = load_file(file)
    own = {name: x for name, x in tensors.items() if not name.startswith("lora.")}
    return own, {name: x for name, x in tensors.items() if name not in own}


def test_drafter_lora_from_checkpoint_trains_resumes_and_exports_merged(
    command: Command, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = ("drafter.heads=4", "drafter.layers=2")
    first = trained(command, material, *heads)
    capsys.readouterr()
    steps = (*heads, "name=second", f"train.init={first}", *RANK, "train.steps=3", "train.checkpoint_every=1")
    steps += ("train.keep_last=4",)
    last = trained(command, material, *steps)
    said = " ".join(capsys.readouterr().out.split())
    assert f"frozen parameters, from {first}; LoRA of rank 2 on 8 linear maps, 1,024 trainable parameters" in said
    folder = last.parent
    assert [path.name for path in sorted(folder.iterdir())] == [f"step-0000{step}" for step in range(4)]
    begun, ended = (apart(folder / name / "drafter.safetensors") for name in ("step-00000", "step-00003"))
    start = load_file(first / "drafter.safetensors")
    assert all(torch.equal(own[name], x) for name, x in start.items() for own, _ in (begun, ended))
    assert all(bool(x.any()) == ("lora_A" in name) for name, x in begun[1].items())
    assert all(not torch.equal(begun[1][name], x) for name, x in ended[1].items())
    optimiser = load_file(last / "optimizer-00000.safetensors")
    assert {name.partition(".lora_")[1] for name in optimiser if name.startswith("drafter.")} <= {".lora_"}

    whole = (last / "drafter.safetensors").read_bytes()
    shutil.rmtree(last)
    state = last.parents[1] / "run.json"
    state.write_text(state.read_text().replace('"finished": true', '"finished": false'))
    assert command(*arguments(material, *steps, "resume=auto")) == 0
    assert "(resumed at step 2)" in capsys.readouterr().out
    assert (last / "drafter.safetensors").read_bytes() == whole

    target = f"target.path={material / 'target'}"
    assert command("export", f"checkpoint={last}", "target=hf", target, "format=vllm", "out=merged") == 0
    exported = load_file("merged/model.safetensors")
    moved = exported["blocks.0.layers.0.weight"]
    a_RI, b_OR = (ended[1][f"lora.heads.0.blocks.0.linear.lora_{x}.weight"] for x in "AB")
    torch.testing.assert_close(moved, start["heads.0.blocks.0.linear.weight"] + 4.0 * b_OR @ a_RI)
    third = ("name=third", *heads, f"train.init={last}", "train.lr=1e-30", "train.steps=1")
    assert command(*arguments(material, *third)) == 0
    (weights,) = Path("outputs/third").glob("*/checkpoints/step-00001/drafter.safetensors")
    assert torch.equal(load_file(weights)["heads.0.blocks.0.linear.weight"], moved)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("train.lora.rank=-1",), "train.lora.rank is -1; set it to 0 or more"),
        ((*RANK,), "train.lora.rank is 2 without train.init, but LoRA on random weights learns nothing; give a checkpoint"),
    ],
)
def test_drafter_lora_invalid_settings_are_refused_in_one_line(
    more: tuple[str, ...], words: str, command: Command, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments(material, *more)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and words in lines[0], lines
    assert not Path("outputs").exists()


@pytest.mark.slow
@pytest.mark.sampled(stage=[0, 3], processes=[2], recipe=["medusa", "eagle3"])
@pytest.mark.parametrize(("stage", "processes"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 1)])
@pytest.mark.parametrize("recipe", ["medusa", "eagle3", "draft_model"])
def test_drafter_lora_zero_stages_and_processes_equal_one_process(
    recipe: str, stage: int, processes: int, material: Path, tmp_path: Path
) -> None:
    """And so for Muon at every stage, up to bfloat16's rounding of another order of sums."""
    family = (f"recipe={recipe}", "decode.tree_nodes=8", "train.lr=5e-3", "train.steps=4")
    init = sorted(once(material, *family, "train.optimizer=adamw").glob("checkpoints/step-*"))[-1]
    for optimizer, tolerance in (("adamw", 1e-5), ("muon", 1e-2)):
        steps = (*family, f"train.init={init}", *RANK, f"train.optimizer={optimizer}")
        one = once(material, *steps)
        run = fit(material, tmp_path / optimizer, *steps, f"deepspeed=zero{stage}", f"launcher.nproc={processes}")
        assert losses(run) == pytest.approx(losses(one), rel=tolerance)
        (own, matrices), (expected, others) = apart(last_weights(run)), apart(last_weights(one))
        assert own.keys() == expected.keys() and all(torch.equal(own[name], x) for name, x in expected.items())
        assert matrices.keys() == others.keys()
        for name, x in others.items():
            torch.testing.assert_close(matrices[name], x, atol=max(tolerance, 1e-4), rtol=max(tolerance, 1e-3))


AROUND = ("train.precision=bfloat16", "train.activation_checkpointing=true", "data.pack=true")  # what the layers do not see


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("eagle3", AROUND),
        pytest.param("eagle3", ("train.compile=on",), marks=pytest.mark.grid),  # unit/train/test_compiled.py has gradients
        ("eagle3", ("train.sequence_parallel=2", "launcher.nproc=2")),
        ("eagle3", ("train.lora.targets=[lm_head,q_proj]",)),
        ("draft_model", ("train.on_policy=0.5",)),
    ],
    ids=["bfloat16, recomputed, packed", "compiled", "sequence parallel", "head", "on policy"],
)
def test_drafter_lora_with_other_training_settings_trains_all_matrices(
    recipe: str, more: tuple[str, ...], material: Path, tmp_path: Path
) -> None:
    family = (f"recipe={recipe}", "decode.tree_nodes=8", "train.lr=5e-3", "train.steps=4")
    init = sorted(once(material, *family, "train.optimizer=adamw").glob("checkpoints/step-*"))[-1]
    run = fit(material, tmp_path, *family, f"train.init={init}", "train.optimizer=adamw", *RANK, *more)
    assert len(losses(run)) == 4
    _, matrices = apart(last_weights(run))
    assert matrices and all(bool(x.any()) for x in matrices.values())
    assert json.loads((last_weights(run).parent / "drafter.json").read_text())["lora"]["rank"] == 2


@pytest.mark.slow
def test_draft_model_lora_zero3_frozen_norms_losses_equal_stage_0(material: Path, tmp_path: Path) -> None:
    """Also those of a draft model with matrices of its own, which drafts before the first step."""
    steps = ("recipe=draft_model", "decode.tree_nodes=8", "train.steps=3", "drafter.lora_rank=2")
    assert losses(fit(material, tmp_path, *steps, "deepspeed=zero3")) == pytest.approx(losses(once(material, *steps)), rel=1e-5)
