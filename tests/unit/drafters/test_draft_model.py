"""Where a draft model comes from, its adapters, its checkpoints, and replies that it writes for its own training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.data.chat import Encoded
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, load_drafter, save_drafter
from drafttrain.drafters.draft_model import FAMILY, DraftModelOptions, build
from drafttrain.measure.flags import best, distillation
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter, trainable
from drafttrain.targets.companion import resize
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import World
from drafttrain.train.following import OnPolicy, check_on_policy
from tests.contract import test_families as contract
from tests.helpers import prompts, tiny_model, tiny_target


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama like the tiny target, of other weights, padded to another vocabulary size."""
    folder = tmp_path_factory.mktemp("small")
    tiny_model(seed=1).save_pretrained(folder)
    return folder


def fast_target() -> FastTarget:
    return FastTarget(tiny_model())


def saved(drafter: Drafter, options: DraftModelOptions, target: HFTarget, folder: Path) -> Path:
    shape = target.shape
    record = TargetRecord("hf", "x", None, "float32", shape.vocab_size, shape.hidden_size, shape.blocks, target.fingerprint)
    folder.mkdir()
    save_drafter(folder, drafter.state_dict(), CheckpointMeta("draft_model", asdict(options), {}, record, 3))
    return folder


def decoded(target: HFTarget, drafter: Drafter | None, batch: int = 2, count: int = 3) -> list[Any]:
    results = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=16).run(prompts(count, seed=3), batch).results
    return [(r.tokens, r.verifications) for r in results]


def shaken(drafter: Drafter, seed: int = 0) -> Drafter:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return drafter


VARIANTS: dict[str, dict[str, Any]] = {
    "scratch": {"source": "scratch", "blocks": 2, "hidden_size": 16},
    "adapters": {"blocks": 3, "lora_rank": 2},
    "loaded": {"source": "hf"},
    "loaded, adapters": {"source": "hf", "lora_rank": 4, "lora_alpha": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_draft_model_of_every_source_passes_family_contract(
    variant: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = VARIANTS[variant] | ({"path": str(small)} if VARIANTS[variant].get("source") == "hf" else {})
    monkeypatch.setitem(contract.SHAPES, "draft_model", shape)
    contract.test_drafter_greedy_output_equals_plain_decoding("draft_model", 0.2, 4)
    contract.test_drafter_training_predictions_equal_draft_tokens("draft_model")
    contract.test_drafter_restored_state_proposes_same_tokens("draft_model")
    contract.test_drafter_reloaded_checkpoint_drafts_same_tokens("draft_model", tmp_path)


@pytest.mark.slow
def test_draft_model_with_lora_sampling_follows_target_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.SHAPES, "draft_model", {"blocks": 2, "lora_rank": 2})
    contract.test_drafter_sampling_follows_target_distribution("draft_model")


def test_draft_model_from_scratch_has_requested_shape() -> None:
    lm: Any = build(DraftModelOptions(source="scratch", blocks=6, hidden_size=16), fast_target()).language_model()
    shape = lm.shape
    assert (shape.blocks, shape.hidden_size, shape.heads, shape.kv_heads, shape.intermediate_size) == (6, 16, 2, 2, 24)
    assert isinstance(lm, FastTarget) and all(p.requires_grad for p in lm.parameters())
    whole: Any = build(DraftModelOptions(source="scratch", blocks=1), tiny_target("gpt2")).language_model()
    assert whole.shape.hidden_size == 32 and whole.shape.blocks == 1


def test_draft_model_invalid_options_are_refused_in_one_line(subtests: pytest.Subtests) -> None:
    target = tiny_target()
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"source": "elsewhere"}, "choose one of pruned, scratch, hf"),
        ({"source": "hf"}, "needs drafter.path"),
        ({"path": "x/y"}, "go together"),
        ({"hidden_size": 16}, "leave it out"),
        ({"source": "scratch", "hidden_size": 20}, "choose a multiple"),
        ({"source": "scratch", "blocks": 0}, "set it to 1 or more"),
        ({"source": "scratch", "lora_rank": 4}, "has none"),
        ({"lora_rank": -1}, "drafter.lora_rank is -1; set it to 0 or more"),
        ({"source": "hf", "path": "./nowhere"}, "does not exist"),
        ({"source": "hf", "path": str(Path(__file__).parent)}, "has no config.json"),
        ({"quantize": "int2"}, "choose one of int8, int4, or null"),
    )
    for options, line in wrong:
        with subtests.test(options=options):
            with pytest.raises(UserError, match=line) as refused:
                FAMILY.build(DraftModelOptions(**options), target)
            assert "\n" not in str(refused.value)


def test_draft_model_checkpoint_needs_only_base_config_to_load(small: Path, tmp_path: Path) -> None:
    target, base = fast_target(), tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).write_bytes((small / name).read_bytes())
    options = DraftModelOptions(source="hf", path=str(base))
    drafter = shaken(build(options, target)).eval()
    folder, wanted = saved(drafter, options, target, tmp_path / "step"), decoded(target, drafter)
    (base / "model.safetensors").unlink()
    assert decoded(target, load_drafter(folder, target)[0]) == wanted
    with pytest.raises(UserError, match="no weights to train"):
        build(options, target).prepare(lambda: torch.zeros(0))
    (base / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        load_drafter(folder, target)


def test_companion_resize_vocabulary_keeps_known_rows(small: Path, tmp_path: Path) -> None:
    for size in (60, 70):
        model: Any = AutoModelForCausalLM.from_pretrained(small)
        known = model.get_output_embeddings().weight[:60].clone()
        resize(model, size)
        assert model.get_output_embeddings().weight.shape[0] == size == model.config.vocab_size
        assert torch.equal(model.get_output_embeddings().weight[:60], known)
        logits_V = model(torch.tensor([[3, 5]])).logits[0, -1]
        assert size == 60 or logits_V.argmax() < 64
    model.save_pretrained(tmp_path / "padded")
    with pytest.raises(UserError, match="add the tokenizer's files"):
        build(DraftModelOptions(source="hf", path=str(tmp_path / "padded")), fast_target())


@pytest.mark.parametrize("make", [fast_target, tiny_target, lambda: tiny_target("gpt2")])
def test_draft_model_lora_trains_adapters_alone_and_decodes_merged(make: Any) -> None:
    target = make()
    options = DraftModelOptions(blocks=3, lora_rank=2)
    drafter = build(options, target)
    assert 0 < trainable(drafter) < sum(p.numel() for p in drafter.parameters()) / 2
    assert all("lora_" in name for name, p in drafter.named_parameters() if p.requires_grad)
    shaken(drafter)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    text = torch.tensor([[3, 9, 4, 1, 7]])
    batch = TrainBatch(text, torch.arange(5)[None], torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    with torch.no_grad():
        (unmerged,) = drafter.eval().predict(batch)
        decoded(target, drafter, count=1)  # decoding merges
        called = []
        layers = [m for m in drafter.modules() if hasattr(m, "lora_A") and hasattr(m, "get_delta_weight")]
        for layer in layers:
            layer.lora_A["default"].register_forward_hook(lambda *_: called.append(1))
        (merged,) = drafter.predict(batch)
        assert layers and not called
        torch.testing.assert_close(merged.hidden_MH, unmerged.hidden_MH, rtol=1e-4, atol=1e-4)
        (again,) = drafter.train().eval().predict(batch)
        assert called and torch.equal(again.hidden_MH, unmerged.hidden_MH)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


def chats(count: int) -> list[Encoded]:
    mask = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0], np.bool_)
    return [Encoded(np.arange(i, i + 11, dtype=np.int32), mask) for i in range(count)]


def on_policy(rows: list[Encoded], step: int = 3, rank: int = 0, size: int = 1, **options: Any) -> list[Encoded]:
    drafter = build(DraftModelOptions(blocks=2), fast_target())
    policy = OnPolicy(drafter, frozenset({7, 11}), TrainOptions(**options), World(rank, size))
    found = policy.rows(rows, step)
    assert drafter.training or not options.get("on_policy")
    return found


def test_on_policy_replies_depend_on_step_not_on_process_count() -> None:
    rows = chats(8)
    assert on_policy(rows) is rows
    first, again, other = (on_policy(rows, step, on_policy=0.5) for step in (3, 3, 4))
    for a, b in zip(first, again, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.mask.tolist() == b.mask.tolist()
    changed = [i for i in range(8) if first[i] is not rows[i]]
    assert 0 < len(changed) < 8
    assert [r.token_ids.tolist() for r in first] != [r.token_ids.tolist() for r in other]
    for i in changed:
        start = rows[i].last_reply
        assert start == 7 and first[i].token_ids[:7].tolist() == rows[i].token_ids[:7].tolist()
        assert (
            8 <= len(first[i].token_ids) <= 11
            and first[i].mask[7:].all()
            and first[i].mask[:7].tolist() == [0, 0, 1, 1, 0, 0, 0]
        )
    shares = [on_policy(rows, rank=rank, size=2, on_policy=0.5) for rank in (0, 1)]
    for i in range(8):
        assert shares[i % 2][i].token_ids.tolist() == first[i].token_ids.tolist()


def test_on_policy_greedy_replies_equal_draft_model_decoding() -> None:
    rows = chats(3)
    lm = build(DraftModelOptions(blocks=2), fast_target()).eval().language_model()
    assert lm is not None
    asked = [row.token_ids[:7].tolist() for row in rows]
    wanted = Decoder(lm, None, "greedy", Sampling(), frozenset({7, 11}), 4).run(asked, 1).results
    found = on_policy(rows, on_policy=1.0, on_policy_temperature=0.0)
    assert [row.token_ids[7:].tolist() for row in found] == [r.tokens for r in wanted]


def test_on_policy_draft_model_gets_gradients_after_generation() -> None:
    drafter = build(DraftModelOptions(blocks=2), fast_target())
    OnPolicy(drafter, frozenset(), TrainOptions(on_policy=1.0), World(0, 1)).rows(chats(2), 0)
    text = torch.tensor([[3, 9, 4, 1, 7]])
    batch = TrainBatch(text, torch.arange(5)[None], torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    (prediction,) = drafter.predict(batch)
    prediction.head(prediction.hidden_MH).sum().backward()
    assert all(p.grad is not None for p in drafter.parameters())


def test_on_policy_unsupported_drafter_or_zero3_is_refused() -> None:
    target, none = tiny_target(), DeepSpeedOptions()
    writer, mute = build(DraftModelOptions(), target), contract.build("medusa", target)
    check_on_policy(mute, TrainOptions(), none)
    check_on_policy(writer, TrainOptions(on_policy=1.0), none)
    with pytest.raises(UserError, match="no language model"):
        check_on_policy(mute, TrainOptions(on_policy=0.5), none)
    with pytest.raises(UserError, match="stage 3 shards"):
        check_on_policy(writer, TrainOptions(on_policy=0.5), DeepSpeedOptions(zero_stage=3))


def entry(step: int, tau: float, speedup: float) -> dict[str, Any]:
    speeds = dict.fromkeys(("speedup", "speedup_min", "speedup_max"), speedup)
    return {"name": f"step-{step}", "step": step, "tau": tau, "repeats": 3} | speeds


def test_measure_flags_step_zero_is_best_only_with_higher_tau() -> None:
    assert best([entry(0, 2.0, 1.9), entry(4, 2.0, 1.5)]) == "step-4"
    assert best([entry(0, 2.1, 1.9), entry(4, 2.0, 1.5)]) == "step-0"
    assert best([entry(0, 2.1, 1.9)]) == "step-0"
    (helped,) = distillation([entry(0, 1.5, 1.0), entry(2, 1.8, 1.0), entry(4, 1.7, 1.0)])
    assert helped == "distillation raised tau from 1.50 (step-0) to 1.80 (step-2)"
    (note,) = distillation([entry(0, 2.0, 1.0), entry(4, 1.5, 1.0)])
    assert "did not help" in note and "2.00 before it (step-0)" in note
    assert not distillation([entry(2, 2.0, 1.0), entry(4, 1.5, 1.0)])


@pytest.mark.sampled
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("make", [fast_target, tiny_target, lambda: tiny_target("gpt2")])
def test_draft_model_quantized_is_close_and_checkpoint_stays_unquantized(make: Any, quantize: str, tmp_path: Path) -> None:
    target = make()
    options = DraftModelOptions(blocks=3, lora_rank=2, quantize=quantize)
    drafter = shaken(build(options, target)).eval()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    again, _ = load_drafter(saved(drafter, options, target, tmp_path / "step"), target)
    ((name, plain),) = again.variants().items()
    assert name == "unquantised" and not plain.variants() and not build(DraftModelOptions(), target).variants()
    text = torch.tensor([[3, 9, 4, 1, 7]])
    batch = TrainBatch(text, torch.arange(5)[None], torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    states, wanted = [], [tokens for tokens, _ in decoded(target, None)]
    for model in (plain, again):
        assert [tokens for tokens, _ in decoded(target, model)] == wanted
        with torch.no_grad():
            states.append(next(iter(model.predict(batch))).hidden_MH)
    apart = float((states[0] - states[1]).norm() / states[0].norm())
    assert apart < (0.1 if quantize == "int8" else 0.6)
    assert apart > 0.0 or isinstance(target.model, GPT2LMHeadModel)  # whose maps are no linear layers
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())
    with torch.no_grad():
        trained = next(iter(again.train().eval().predict(batch))).hidden_MH
    torch.testing.assert_close(trained, states[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_draft_model_int8_passes_greedy_and_sampling_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.SHAPES, "draft_model", {"blocks": 2, "quantize": "int8"})
    contract.test_drafter_greedy_output_equals_plain_decoding("draft_model", 0.2, 4)
    contract.test_drafter_sampling_follows_target_distribution("draft_model")
