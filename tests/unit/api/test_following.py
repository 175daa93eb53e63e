"""Drafters follow a model by hooks on its own training passes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import drafttrain as dt
from drafttrain.features.padded import PassRecorder
from drafttrain.model.target import FINAL, Taps
from tests.helpers import tiny_model
from tests.unit.api.test_online import follower, tokens


def test_pass_recorder_records_training_passes_only() -> None:
    model = tiny_model().train()
    drafter, other = follower(model, "eagle3"), follower(model, "eagle3")
    model.gradient_checkpointing_enable()  # it adds a hook of its own
    hooks = [len(module._forward_hooks) for module in model.modules()]
    recorder = PassRecorder(drafter.target, drafter.taps | Taps(final=True), keep=2)
    labels_BT = tokens().clone()
    labels_BT[:, :5] = -100
    for seed in range(3):
        model(input_ids=tokens(seed=seed), labels=labels_BT).loss.backward()
    with torch.no_grad():
        model(input_ids=tokens())
    model.eval()(input_ids=tokens())
    passes = recorder.take()
    assert [bool(torch.equal(p.token_BT, tokens(seed=seed))) for p, seed in zip(passes, (1, 2), strict=True)] == [True, True]
    assert passes[0].hidden.keys() == {*drafter.taps.blocks, FINAL} and not recorder.take()
    assert not any(state.requires_grad for state in passes[0].hidden.values())
    found, expected = drafter.step_on(passes[:1]), other.step(tokens(seed=1), mask=labels_BT != -100)
    assert found.loss == pytest.approx(expected.loss, rel=1e-4) and found.supervised == expected.supervised == 27
    drafter.tau([[1, 2, 3]], max_new_tokens=2)
    recorder.close()
    assert hooks == [len(module._forward_hooks) for module in model.modules()]


@pytest.mark.slow
def test_follow_callback_trains_drafters_in_grpo_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason='trl is not installed; pip install "drafttrain[rl]"')
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from drafttrain.targets.load import EMBEDDED

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    drafters = [dt.OnlineDrafter(model, recipe, [], tokenizer=tokenizer) for recipe in ("medusa", "eagle3")]
    before = [{name: x.clone() for name, x in drafter.module.state_dict().items()} for drafter in drafters]
    seen: list[tuple[int, list[dt.StepMetrics]]] = []
    settings = trl.GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completion_ids, **kwargs: [float(len(set(ids))) for ids in completion_ids],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"def f{n}(x):"}]} for n in range(8)]),
        processing_class=tokenizer,
        callbacks=[dt.FollowCallback(*drafters, report=lambda step, metrics: seen.append((step, metrics)))],
    )
    trainer.train()
    assert [step for step, _ in seen] == [0, 1]
    assert all(m.stepped and 8 <= m.supervised <= 8 * 12 for _, metrics in seen for m in metrics)
    for drafter, old in zip(drafters, before, strict=True):
        assert drafter.steps == 2 and any(not torch.equal(x, old[name]) for name, x in drafter.module.state_dict().items())
    kept = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not any(hook.__module__.startswith("drafttrain") for hook in kept)


def test_follow_callback_trains_drafters_in_transformers_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model, seen = tiny_model(), list[tuple[int, list[dt.StepMetrics]]]()
    drafters = [follower(model, recipe) for recipe in ("medusa", "eagle3")]
    before = [{name: x.clone() for name, x in drafter.module.state_dict().items()} for drafter in drafters]
    settings = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row_T, "labels": row_T} for row_T in tokens(8, 12)]
    callback = dt.FollowCallback(*drafters, every=2, report=lambda step, metrics: seen.append((step, metrics)))
    Trainer(model=model, args=settings, train_dataset=rows, callbacks=[callback]).train()
    assert [step for step, _ in seen] == [1, 3], "every second step of the trainer"
    assert all(m.stepped and m.supervised == 2 * 2 * 2 * 11 for _, metrics in seen for m in metrics), (
        "all passes since the last"
    )
    for drafter, old in zip(drafters, before, strict=True):
        assert drafter.steps == 2 and any(not torch.equal(x, old[name]) for name, x in drafter.module.state_dict().items())
    kept = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not any(hook.__module__.startswith("drafttrain") for hook in kept)


@pytest.mark.slow
def test_follow_callback_resumed_trainer_gives_uninterrupted_drafters(tmp_path: Path) -> None:
    """The drafters' states are in the trainer's own checkpoint."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row_T, "labels": row_T} for row_T in tokens(8, 12)]

    def trained(resume: bool, steps: int) -> list[dt.OnlineDrafter]:
        torch.manual_seed(0)
        model = tiny_model()
        drafters = [follower(model, recipe) for recipe in ("medusa", "eagle3")]
        settings = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, max_steps=steps, save_strategy="steps", save_steps=2, report_to=[],
            use_cpu=True, disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Trainer(model=model, args=settings, train_dataset=rows, callbacks=[dt.FollowCallback(*drafters)])
        trainer.train(resume_from_checkpoint=resume)
        return drafters

    whole = trained(False, 4)
    for name in ("drafter-0.safetensors", "drafter-1.safetensors"):
        assert (tmp_path / "checkpoint-2" / name).is_file()
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trained(True, 4)
    for one, other in zip(whole, resumed, strict=True):
        assert other.steps == one.steps == 4
        for name, tensor in one.module.state_dict().items():
            assert torch.equal(tensor, other.module.state_dict()[name]), name
    (tmp_path / "checkpoint-4" / "drafter-1.safetensors").unlink()
    with pytest.warns(UserWarning, match="without .*drafter-1.safetensors; this drafter goes on as it is"):
        assert [drafter.steps for drafter in trained(True, 5)] == [5, 1]
