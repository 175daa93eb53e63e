"""UNO: base weights at the text and the root, LoRA at the random tokens, whichever runner computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.uno import FAMILY, Uno, UnoOptions, decided, random_tokens
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.low_rank import JointLowRank, LowRank, Scale
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.architectures import model_of
from tests.exports import loaded, opened, written
from tests.helpers import prompts, quantised_target, tiny_model, tiny_target, watch_proposals
from tests.tiny import build

CPU = torch.device("cpu")
MODELS = ("llama", "qwen2", "qwen3", "mistral-sliding", "gemma3-sliding")


def shaken(target: HFTarget, draft_length: int = 4) -> Uno:
    """One whose matrices change its drafts."""
    torch.manual_seed(2)
    drafter = Uno(UnoOptions(draft_length=draft_length), target)
    for parameter in drafter.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return drafter


def batch(length: int = 30) -> TrainBatch:
    token_BT = torch.randint(0, 60, (2, length), generator=torch.Generator().manual_seed(0))
    document_BT = torch.zeros_like(token_BT)
    document_BT[1, length // 2 :] = 1
    position_BT = torch.arange(length).repeat(2, 1)
    position_BT[1, length // 2 :] -= length // 2
    return TrainBatch(token_BT, position_BT, document_BT, torch.ones_like(token_BT, dtype=torch.bool))


def gradients(target: HFTarget, recomputes: bool = False) -> list[Tensor]:
    drafter = shaken(target).train()
    if recomputes:
        drafter.recompute()
    loss, _ = Objective(drafter, target, LossOptions())(Online(target, drafter.taps).fill(batch()), 0.5)
    loss.backward()
    return [loss.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)]


@pytest.mark.sampled(name=("qwen2", "mistral-sliding", "gemma3-sliding"))
@pytest.mark.parametrize("name", MODELS)
def test_uno_hf_and_fast_targets_train_and_draft_alike(name: str) -> None:
    hf, fast = tiny_target(name), FastTarget(tiny_model(name))
    ours, theirs = gradients(fast), gradients(hf)
    assert len(ours) == len(theirs) == 1 + 2 * 7 * 4
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-3)
    for a, b in zip(ours, gradients(fast, recomputes=True), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    seen = []
    for target in (hf, fast):
        drafter = shaken(target).eval()
        trees = watch_proposals(drafter)
        Decoder(target, drafter, "greedy", Sampling(), frozenset(), 12).run(prompts(2, seed=3), 2)
        seen.append([tree.token_BN.tolist() for tree in trees])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", ["Phi-3, Phi-4", "Gemma-2", "OLMo-2", "Cohere-2"])
def test_uno_other_fast_architectures_train_and_keep_greedy_output(name: str) -> None:
    """Joined maps, norms elsewhere, capped scores, a parallel MLP: every matrix learns and the text is the target's."""
    target = FastTarget(model_of(name))
    drafter = shaken(target, 3).train()
    loss, _ = Objective(drafter, target, LossOptions())(Online(target, drafter.taps).fill(batch()))
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in drafter.parameters())
    plain = Decoder(target, None, "greedy", Sampling(), frozenset(), 16).run(prompts(3, vocab=60, seed=3), 2).results
    ours = Decoder(target, drafter.eval(), "greedy", Sampling(), frozenset(), 16).run(prompts(3, vocab=60, seed=3), 2).results
    assert [r.tokens for r in ours] == [r.tokens for r in plain]


def test_uno_text_positions_equal_target_and_target_weights_stay() -> None:
    target = FastTarget(tiny_model())
    before = {name: p.clone() for name, p in target.model.named_parameters()}
    drafter = shaken(target)
    token_BN = torch.randint(0, 60, (2, 9))
    position_BN, at_BN = torch.arange(9).expand(2, 9), torch.arange(9).expand(2, 9) >= 5
    caches: list[KVCache] = [target.new_cache(2, 16) for _ in range(2)]
    with torch.no_grad():
        whole = target(token_BN, caches[0], None, position_BN, Taps(final=True)).hidden[FINAL]
        out = drafter.matrices.run(token_BN, caches[1], None, position_BN, at_BN, Taps(final=True), token_BN[:, :0])
    torch.testing.assert_close(out.hidden[FINAL][:, :5], whole[:, :5], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out.hidden[FINAL][:, 5:], whole[:, 5:], atol=1e-2)
    for layer in range(4):
        for own, base in zip(caches[1].read(layer, 5), caches[0].read(layer, 5), strict=True):
            torch.testing.assert_close(own, base, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(p, before[name]) and not p.requires_grad for name, p in target.model.named_parameters())
    assert all(name.startswith("matrices.model.layers.") and ".lora_" in name for name in drafter.state_dict())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.9, seed=4)])
def test_uno_first_draft_is_always_accepted(sampling: Sampling) -> None:
    """It has the target's own distribution, so every verification gives two tokens and more."""
    target = FastTarget(tiny_model())
    decoder = Decoder(target, build("uno", target, 0.3), "greedy" if sampling.greedy else "lossless", sampling, frozenset(), 25)
    for result in decoder.run(prompts(4, seed=5), 2).results:
        assert result.lengths and min(result.lengths[:-1], default=2) >= 2


def test_uno_random_tokens_are_function_of_position() -> None:
    position_M = torch.arange(4000)
    token_M = random_tokens(position_M, 64)
    assert torch.equal(token_M, random_tokens(position_M, 64)) and torch.equal(
        token_M[700:], random_tokens(position_M[700:], 64)
    )
    count_V = token_M.bincount(minlength=64)
    assert len(count_V) == 64 and int(count_V.min()) > 30 and int(count_V.max()) < 105
    assert (random_tokens(position_M, 64, seed=1) == token_M).float().mean() < 0.05


def test_uno_training_loss_changes_with_progress_and_repeats_on_resume() -> None:
    target = tiny_target()
    losses = []
    for progress in (0.25, 0.5, 0.25):
        drafter = shaken(target, 3).train()
        filled = Online(target, drafter.taps).fill(batch())
        losses.append(float(Objective(drafter, target, LossOptions())(filled, progress)[0].detach()))
    assert losses[0] == losses[2] != losses[1]


def test_uno_greedy_tree_has_one_child_at_root() -> None:
    logits_V = torch.tensor([[0.5, 2.0, 1.9, -1.0]])
    probability_V = decided(logits_V).softmax(-1)
    assert decided(logits_V).argsort(descending=True).tolist() == [[1, 2, 0, 3]] and float(probability_V[0, 1]) > 1 - 1e-9
    target = tiny_target()
    drafter = Uno(UnoOptions(draft_length=3, tree="best_first", nodes=8), target).eval()
    seen = watch_proposals(drafter)
    Decoder(target, drafter, "greedy", Sampling(), frozenset(), 12).run(prompts(2, seed=3), 2)
    assert all(int((tree.parent_BN == 0).sum()) == len(tree.token_BN) for tree in seen)


def test_uno_invalid_target_or_options_are_refused_in_one_line(subtests: pytest.Subtests) -> None:
    tiny = tiny_target()
    wrong: tuple[tuple[HFTarget, dict[str, Any], str], ...] = (
        (FastTarget(model_of("Mixtral")), {}, "mixtures of experts"),
        (HFTarget(model_of("Qwen3.5 (text)")), {}, "recurrent layers"),
        (quantised_target("int8"), {}, "leave target.weights out"),
        (tiny, {"lora_targets": ["c_attn"]}, "drafter.lora_targets has c_attn; the blocks' linear maps are down_proj"),
        (tiny, {"lora_rank": 0}, "drafter.lora_rank is 0"),
        (tiny, {"lora_alpha": 0.0}, "drafter.lora_alpha is 0"),
        (tiny, {"draft_length": 0}, "drafter.draft_length is 0"),
        (tiny, {"retention": 0.0}, "drafter.retention is 0"),
    )
    for target, options, text in wrong:
        with subtests.test(text=text):
            with pytest.raises(UserError) as caught:
                FAMILY.build(UnoOptions(**options), target)
            assert text in str(caught.value) and "\n" not in str(caught.value)


def test_uno_bfloat16_target_is_exported_from_float32(tmp_path: Path) -> None:
    narrow = loaded()
    model: Any = tiny_model()
    for parameter in model.parameters():  # but not the rotary frequencies, which stay in float32 in a model that is loaded
        parameter.data = parameter.data.to(torch.bfloat16)
    narrow = type(narrow)(HFTarget(model), narrow.tokenizer, narrow.path, narrow.description)
    found, golden = opened(tmp_path, "uno", narrow)
    assert written(found, golden, "sglang", tmp_path / "out").written["sglang"].gap < 0.5
    assert narrow.target.dtype == torch.bfloat16


def test_uno_export_loaded_by_peft_gives_same_logits(tmp_path: Path) -> None:
    """At the random tokens the hidden states are those of peft's own model, where its adapter is everywhere."""
    from peft import PeftModel

    found, golden = opened(tmp_path, "uno-few")
    written(found, golden, "sglang", tmp_path / "out")
    theirs: Any = PeftModel.from_pretrained(tiny_model(), tmp_path / "out")
    drafter, token_BN = found.drafter, torch.randint(0, 60, (1, 8))
    assert isinstance(drafter, Uno)
    everywhere, position_BN = torch.ones_like(token_BN, dtype=torch.bool), torch.arange(8)[None]
    with torch.no_grad():
        out = drafter.matrices.run(token_BN, None, None, position_BN, everywhere, Taps(), position_BN)  # type: ignore[arg-type]
        torch.testing.assert_close(out.logits_BRV, theirs(token_BN).logits, atol=1e-4, rtol=1e-4)


def test_joined_low_rank_maps_add_what_the_maps_add_one_by_one() -> None:
    """In bfloat16, whose products no CPU packs; where the factor is 0 the output stays as it is."""
    torch.manual_seed(0)
    scale = Scale()
    scale.factor_BN1, scale.decodes = torch.tensor([[[0.0], [1.0], [0.5]]]).bfloat16(), True
    parts = [LowRank(16, width, 4, scale).bfloat16() for width in (8, 24)]
    for part in parts:
        torch.nn.init.normal_(part.lora_B.weight)
    joint = JointLowRank(parts, [8, 24], None)
    joint.refresh()
    x, out = (torch.randn(1, 3, width).bfloat16() for width in (16, 32))
    found, wanted = joint.add_to(out, x), out + torch.cat([part(x) for part in parts], -1)
    torch.testing.assert_close(found, wanted, atol=6e-2, rtol=2e-2)
    assert torch.equal(found[:, 0], out[:, 0])
