"""Medusa-2: the target is trained beside its drafter, in copies that leave the original as it is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from drafttrain.commands.measure import measure_run
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters import cascade
from drafttrain.drafters.cascade import CascadeOptions
from drafttrain.drafters.checkpoint import (
    CheckpointMeta,
    TargetRecord,
    adapter_state,
    load_checkpoint,
    load_drafter,
    save_drafter,
    start_weights,
)
from drafttrain.drafters.medusa import FAMILY, Medusa, MedusaOptions
from drafttrain.features.online import Online
from drafttrain.measure import DecodeOptions, MeasureOptions
from drafttrain.measure.runner import CheckpointRef
from drafttrain.model.batch import TrainBatch
from drafttrain.model.lora import LoraSpec
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.lora_target import AdaptedObjective, drafter_weight, rate_scale
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.runs.options import RunOptions
from drafttrain.targets.adapt import Adapter, own_bytes
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.parallel import Part
from drafttrain.targets.structure import fingerprint_of
from tests.helpers import prompts, tiny_model, tiny_target
from tests.unit.measure.test_runner import SCHEMA, Letters, check
from tests.unit.measure.test_runner import prompts as prompt_file

TREE = [[0], [1], [0, 0], [0, 1]]
SPEC = LoraSpec(rank=3, alpha=6.0)


def shaken(adapter: Adapter, seed: int = 0, by: float = 0.1) -> Adapter:
    torch.manual_seed(seed)
    for parameter in adapter.parameters():
        parameter.data.add_(by * torch.randn_like(parameter))
    return adapter


def text(rows: int = 2, length: int = 14, seed: int = 0) -> TrainBatch:
    token_BT = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask_BT = torch.arange(length).expand(rows, length) >= 3
    return TrainBatch(token_BT, torch.arange(length).expand(rows, length), torch.zeros_like(token_BT), mask_BT)


def logits(target: HFTarget) -> torch.Tensor:
    batch = text()
    with torch.no_grad():
        found = target(batch.token_BT, None, None, batch.position_BT, Taps()).logits_BRV
    assert found is not None
    return found


def built(target: HFTarget, spec: LoraSpec = SPEC) -> tuple[Medusa, Adapter]:
    torch.manual_seed(5)
    drafter = Medusa(MedusaOptions(heads=2, paths=TREE, adapter=spec), target)
    assert drafter.adapts is spec
    return drafter, Adapter(target, spec)


@pytest.mark.sampled(name=("qwen2", "gpt2", "gemma3-sliding"))
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma3-sliding", "falcon"])
def test_target_adapter_fresh_is_identity_and_merged_equals_unmerged(name: str) -> None:
    target = tiny_target(name)
    before, weights = logits(target), [p.clone() for p in target.model.parameters()]
    adapter = Adapter(target, SPEC)
    assert torch.equal(logits(adapter.target), before) and torch.equal(logits(adapter.merged()), before)
    shaken(adapter)
    merged = adapter.merged()
    assert (logits(adapter.target) - before).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), logits(adapter.target), atol=2e-4, rtol=1e-4)
    assert torch.equal(logits(target), before)
    assert all(torch.equal(a, b) for a, b in zip(weights, target.model.parameters(), strict=True))
    assert merged.fingerprint != target.fingerprint == fingerprint_of(target.model)


def test_target_adapter_merged_fast_target_shares_unadapted_weights() -> None:
    target = FastTarget(tiny_model())
    before = logits(target)
    merged = shaken(Adapter(target, replace(SPEC, modules=["q_proj", "down_proj"]))).merged()
    assert type(merged) is FastTarget and torch.equal(logits(target), before)
    embedding, head = merged.model.get_input_embeddings().weight, merged.model.get_output_embeddings().weight
    assert embedding.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert head.data_ptr() == target.head_weight.data_ptr()
    blocks = sum(p.numel() for p in target.model.base_model.layers.parameters())
    assert 0 < own_bytes(merged, target) <= 4 * blocks
    torch.testing.assert_close(logits(merged), logits(HFTarget(merged.model)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("hold", ["distil", "text"])
def test_adapted_objective_gradients_reach_only_heads_and_lora(hold: str) -> None:
    target = tiny_target()
    weights = [p.clone() for p in target.model.parameters()]
    drafter, adapter = built(target, replace(SPEC, hold=hold))
    objective = AdaptedObjective(drafter, target, LossOptions(), adapter)
    names = {name.split(".")[0] for name, p in objective.named_parameters()}
    assert names == {"drafter", "adapter"}
    optimizer, batch, before = torch.optim.AdamW(objective.parameters(), lr=5e-3), text(), logits(adapter.target)
    first = None
    for _ in range(8):
        optimizer.zero_grad()
        loss, _ = objective(batch, 0.5)
        first = float(loss.detach()) if first is None else first
        (loss / batch.supervised()).backward()
        assert all(p.grad is not None for p in objective.parameters())
        optimizer.step()
    assert any(float(p.grad.abs().sum()) > 0 for n, p in adapter.named_parameters() if "lora_A" in n)  # type: ignore[union-attr]
    assert all(p.grad is None for p in target.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, target.model.parameters(), strict=True))
    assert not torch.equal(logits(adapter.target), before)
    assert first is not None and float(objective(batch, 0.5)[0].detach()) < first


def test_adapted_objective_hold_loss_equals_kl_or_cross_entropy() -> None:
    """By hand: KL(original || adapted), and cross-entropy, over the supervised tokens, whole and in chunks."""
    target, batch = tiny_target(), text()
    for hold in ("distil", "text"):
        drafter, adapter = built(target, replace(SPEC, hold=hold))
        objective = AdaptedObjective(drafter, target, LossOptions(), adapter)
        final = Online(adapter.target, Taps(final=True)).fill(batch).hidden[FINAL]
        if hold == "distil":
            assert float(objective._hold(batch, final)) == pytest.approx(0.0, abs=1e-4)
        shaken(adapter)
        final = Online(adapter.target, Taps(final=True)).fill(batch).hidden[FINAL]
        log_p, log_q = (logits(t)[:, 2:-1].log_softmax(-1) for t in (target, adapter.target))
        wanted = (log_p.exp() * (log_p - log_q)).sum()
        if hold == "text":
            wanted = -log_q.gather(-1, batch.token_BT[:, 3:, None]).sum()
        for chunk in (1024, 5):
            objective.options = LossOptions(chunk=chunk)
            assert float(objective._hold(batch, final)) == pytest.approx(float(wanted), rel=1e-4)


def test_adapted_objective_drafter_loss_uses_adapted_target_distribution() -> None:
    target, batch = tiny_target(), text()
    drafter, adapter = built(target, replace(SPEC, drafter_weight=0.2, ramp=False))
    shaken(adapter)
    options = LossOptions(entropy_drop=0.5)  # follows the progress
    total, counts = AdaptedObjective(drafter, target, options, adapter)(batch, 0.3)
    plain, same = Objective(drafter, target, options)(Online(adapter.target, drafter.taps).fill(batch), 0.3)
    held = AdaptedObjective(drafter, target, LossOptions(), adapter)
    final = Online(adapter.target, Taps(final=True)).fill(batch).hidden[FINAL]
    assert float(total.detach()) == pytest.approx(0.2 * float(plain.detach()) + float(held._hold(batch, final)), rel=1e-5)
    assert torch.equal(counts.packed(), same.packed())


def test_target_adapter_of_bfloat16_target_trains_in_float32_and_rounds_once() -> None:
    target = HFTarget(tiny_model().bfloat16())
    drafter, adapter = built(target)
    objective = AdaptedObjective(drafter, target, LossOptions(), shaken(adapter, by=0.02))
    objective(text(), 0.5)[0].backward()
    assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.any() for p in adapter.parameters())
    merged = adapter.merged()
    name = "layers.1.mlp.down_proj"
    linear, layer = merged.model.base_model.get_submodule(name), adapter.target.model.base_model.get_submodule(name)
    wanted = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    assert linear.weight.dtype == torch.bfloat16 and torch.equal(linear.weight, wanted.bfloat16())
    assert not torch.equal(linear.weight, layer.base_layer.weight)


def test_adapted_objective_before_start_gives_target_no_gradients() -> None:
    target, batch = tiny_target(), text()
    drafter, adapter = built(target, replace(SPEC, start=0.5))
    objective = AdaptedObjective(drafter, target, LossOptions(), adapter)
    objective(batch, 0.5)[0].backward()
    assert all(p.grad is not None and not p.grad.any() for p in adapter.parameters())
    assert all(p.grad is not None and p.grad.any() for p in drafter.parameters())
    objective(batch, 0.6)[0].backward()
    assert any(p.grad is not None and p.grad.any() for p in adapter.parameters())


def test_adapted_objective_weights_and_learning_rates_follow_progress() -> None:
    distil, stages = LoraSpec(drafter_weight=0.01), LoraSpec(drafter_weight=0.2, ramp=False, start=0.5, lr_scale=0.25)
    assert drafter_weight(distil, 1 / 3) == pytest.approx(0.005) and drafter_weight(distil, 1.0) == pytest.approx(0.01)
    assert {drafter_weight(stages, p) for p in (0.1, 0.5, 0.9)} == {0.2}
    assert rate_scale(distil, 0.01, 0.1) == 0.25
    assert [rate_scale(stages, p, 0.1) for p in (0.2, 0.5, 0.55, 0.7)] == pytest.approx([0.0, 0.0, 0.125, 0.25])


def loaded_target() -> LoadedTarget:
    target = tiny_target()
    about = {"name": "hf", "path": "nowhere", "architecture": type(target.model).__name__}
    return LoadedTarget(target, Letters(), "nowhere", about)  # type: ignore[arg-type]


def saved(folder: Path, loaded: LoadedTarget, step: int) -> tuple[CheckpointRef, Medusa, Adapter]:
    drafter, adapter = built(loaded.target)
    shaken(adapter, seed=step)
    shape = loaded.target.shape
    record = TargetRecord(
        "hf", "nowhere", None, "float32", shape.vocab_size, shape.hidden_size, shape.blocks, loaded.target.fingerprint
    )
    options = asdict(MedusaOptions(heads=2, paths=TREE, adapter=SPEC))
    meta = CheckpointMeta("medusa", options, drafter.decode_settings(), record, step, asdict(SPEC))
    path = folder / f"step-{step:05d}"
    with atomic_directory(path) as aside:
        save_drafter(aside, drafter.state_dict() | adapter_state(adapter), meta)
    return CheckpointRef(path.name, path, step), drafter.eval(), adapter


def test_medusa2_checkpoint_reloaded_target_and_drafter_are_same(tmp_path: Path) -> None:
    loaded = loaded_target()
    before = logits(loaded.target)
    ref, drafter, adapter = saved(tmp_path, loaded, 3)
    restored = load_checkpoint(ref.path, loaded)
    assert restored.matrices == sum(p.numel() for p in adapter.parameters())
    assert torch.equal(logits(restored.loaded.target), logits(adapter.merged())) and torch.equal(logits(loaded.target), before)
    found, wanted = (
        Decoder(t, d, "greedy", Sampling(), max_new_tokens=20).run(prompts(3), 2).results
        for t, d in ((restored.loaded.target, restored.drafter), (adapter.merged(), drafter))
    )
    assert [(r.tokens, r.verifications, r.accepted) for r in found] == [(r.tokens, r.verifications, r.accepted) for r in wanted]
    with pytest.raises(UserError, match="its drafts are for an adapted target"):
        load_drafter(ref.path, loaded.target)
    with pytest.raises(UserError, match="checkpoint of another target: its weight fingerprint"):
        load_checkpoint(ref.path, restored.loaded)


@pytest.mark.slow
def test_measure_run_compares_each_checkpoint_with_its_adapted_target(tmp_path: Path) -> None:
    loaded = loaded_target()
    refs = [saved(tmp_path, loaded, step)[0] for step in (1, 2)]
    small = MeasureOptions(minutes=0.0, repeats=1, timed_prompts=2, batch_sizes=[1])
    options = RunOptions(
        measure=small, decode=DecodeOptions(max_new_tokens=10), prompts=str(prompt_file(tmp_path)), output=str(tmp_path)
    )
    console = Console(file=(tmp_path / "console.txt").open("w", encoding="utf-8"), width=80)
    measure_run(loaded, refs, options, tmp_path / "out", console)
    console.file.close()
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    check(report, SCHEMA)
    changes = [entry["target_change"] for entry in report["checkpoints"]]
    for ref, entry, change in zip(refs, report["checkpoints"], changes, strict=True):
        assert entry["name"] == ref.name
        assert (entry["exact_matches"], entry["transformers_exact_matches"], entry["unexplained"]) == (3, 3, 0)
        assert change["prompts"] == 3 and change["changed"] > 0 and change["mib"] > 0
        assert change["original_outputs"]["adapted"] < change["original_outputs"]["original"]
        assert any("NOT of the original" in flag for flag in entry["flags"])
    assert changes[0]["original_outputs"]["original"] == changes[1]["original_outputs"]["original"]
    assert changes[0]["adapted_outputs"] != changes[1]["adapted_outputs"]
    assert "not that of the original" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "NOT" in (tmp_path / "console.txt").read_text(encoding="utf-8")


def test_target_adapter_of_unknown_modules_is_refused_in_one_line() -> None:
    message = "drafter.adapter.modules has lm_head; the blocks' linear maps are down_proj"
    with pytest.raises(UserError, match=message) as raised:
        Adapter(tiny_target(), replace(SPEC, modules=["q_proj", "lm_head"]))
    assert "\n" not in str(raised.value)


def test_medusa_adapter_out_of_its_limits_is_refused(subtests: pytest.Subtests) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"rank": -1}, {"hold": "fast"}, {"start": 1.0}, {"lr_scale": 0.0}, {"alpha": 0.0})
    for change in wrong:
        with subtests.test(change=change), pytest.raises(UserError, match=rf"^drafter\.adapter\.{next(iter(change))} is "):
            FAMILY.build(MedusaOptions(adapter=replace(SPEC, **change)), tiny_target())


def test_start_weights_take_adapter_only_where_both_have_one(tmp_path: Path) -> None:
    target, options = tiny_target(), {"family": "medusa", "heads": 2, "paths": TREE, "adapter": asdict(SPEC)}
    drafter, adapter = built(target)
    matrices = {name: tensor.clone() for name, tensor in shaken(adapter).state_dict().items()}
    record = TargetRecord("hf", "x", None, "float32", 64, target.shape.hidden_size, target.shape.blocks, target.fingerprint)
    for name, spec in (("plain", None), ("adapted", asdict(SPEC))):
        (tmp_path / name).mkdir()
        state = drafter.state_dict() | adapter_state(None if spec is None else adapter)
        save_drafter(tmp_path / name, state, CheckpointMeta("medusa", options, {}, record, 3, spec))
        fresh = built(target)[1]
        assert start_weights(tmp_path / name, drafter, fresh).keys() == drafter.state_dict().keys()
        expected = Adapter(target, SPEC).state_dict() if spec is None else matrices
        assert all(torch.equal(tensor, expected[key]) for key, tensor in fresh.state_dict().items() if "lora_B" in key)


def test_target_adapter_in_cascade_or_tensor_parallel_is_refused() -> None:
    target = tiny_target()
    inner = {"family": "medusa", "heads": 2, "adapter": asdict(SPEC)}
    options = CascadeOptions(middle={"family": "draft_model", "blocks": 2}, inner=inner)
    with pytest.raises(UserError, match=r"drafter\.inner trains the target too"):
        cascade.build(options, target)
    target.part = Part(0, 2)
    with pytest.raises(UserError, match=r"target\.tensor_parallel is 2; leave it out"):
        Adapter(target, SPEC)
