"""Modules that targets come with: read from the files as their architectures compute them, and trained as they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.drafters.mtp_native import FAMILY, MTPNative, MTPNativeOptions
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.hf import HFTarget
from tests.helpers import drafted_and_predicted, prompts, tiny_target, watch_proposals
from tests.native import CONFIGS, Native, native

LAYOUTS = list(CONFIGS)
FEW = ("mimo", "qwen3_5", "deepseek_v3")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Native, HFTarget]:
    made = native(request.param, tmp_path_factory.mktemp("target"))
    return made, target_of(made.directory)


def target_of(directory: Path) -> HFTarget:
    return HFTarget(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa"))


def batch_of(target: HFTarget, drafter: MTPNative, length: int = 14) -> TrainBatch:
    text = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(1))
    whole = torch.ones_like(text, dtype=torch.bool)
    plain = TrainBatch(text, torch.arange(length).expand(2, -1), torch.zeros_like(text), whole)
    return Online(target, drafter.taps).fill(plain)


@pytest.mark.parametrize(
    "found", [pytest.param(layout, marks=() if layout in FEW else pytest.mark.slow) for layout in LAYOUTS], indirect=True
)
def test_mtp_native_first_step_equals_transformers_block(found: tuple[Native, HFTarget]) -> None:
    """The first step's logits are those of transformers' own block, one number after the target's last."""
    made, target = found
    drafter = MTPNative(MTPNativeOptions(), target).eval()
    batch = batch_of(target, drafter)
    first = next(iter(drafter.predict(batch)))
    with torch.no_grad():
        out = made.out(target.embed(batch.after(1)), batch.hidden[FINAL])
        wanted = target.head(out).flatten(0, 1)[first.source_M]
        torch.testing.assert_close(first.head(first.hidden_MH), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.sampled(found=FEW)
@pytest.mark.parametrize("found", LAYOUTS, indirect=True)
def test_mtp_native_training_predictions_equal_draft_tokens(found: tuple[Native, HFTarget]) -> None:
    _, target = found
    drafter = MTPNative(MTPNativeOptions(draft_length=4), target).eval()
    drafts, predicted = drafted_and_predicted(target, drafter, prompts(1, seed=8, longest=30)[0] + [5, 9, 2])
    assert predicted == drafts
    plain, ours = (
        Decoder(target, d, "greedy", Sampling(), max_new_tokens=12).run(prompts(3, seed=3), 3).results for d in (None, drafter)
    )
    assert [r.tokens for r in ours] == [r.tokens for r in plain]


@pytest.mark.sampled(found=FEW)
@pytest.mark.parametrize("found", LAYOUTS, indirect=True)
def test_mtp_native_two_training_steps_lower_loss(found: tuple[Native, HFTarget]) -> None:
    _, target = found
    drafter = MTPNative(MTPNativeOptions(), target).train()
    batch, objective = batch_of(target, drafter), Objective(drafter, target, LossOptions("ce"))
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=1e-3), []
    for _ in range(3):
        loss, _ = objective(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]
    assert all(p.grad is not None for p in drafter.parameters())


def test_mtp_native_loss_weights_equal_fastmtp() -> None:
    drafter = MTPNative(MTPNativeOptions(source="fresh"), tiny_target()).train()
    weights = [float(p.weight) for p in drafter.predict(batch_of(tiny_target(), drafter))]
    assert [round(w, 2) for w in weights] == [0.51, 0.31, 0.18]


def test_mtp_native_step_attends_to_first_step_keys_and_same_index() -> None:
    """Position by position: the block runs once for each query over the keys that decoding would show it."""
    target = tiny_target()
    drafter = MTPNative(MTPNativeOptions(source="fresh", norm_output=False), target).eval()
    batch = batch_of(target, drafter, 9)
    found = {step: (pairs, hidden) for step, pairs, hidden in drafter.unroll(batch, drafter.fuse(batch.hidden), 3)}
    with torch.no_grad():
        for t in (0, 3, 4):
            tokens, state = [batch.token_BT[:1, 1 : t + 2]], batch.hidden[FINAL][:1, : t + 1]
            joined = [drafter.enter(tokens[0], state)[0]]
            for step in range(3):
                x = torch.cat(joined, 1)
                T = x.shape[1]
                mask = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None]
                angles = target.model.base_model.rotary_emb(x, torch.arange(T)[None])
                out = drafter.module.block(x, attention_mask=mask, position_embeddings=angles)[:, -1:]
                pairs, hidden = found[step]
                at = (pairs.source_M == t).nonzero()
                torch.testing.assert_close(hidden[at[0, 0]], out[0, 0], atol=1e-5, rtol=1e-5)
                joined.append(drafter.enter(batch.token_BT[:1, t + 2 + step, None], out)[0])


@pytest.mark.sampled(kind=("mimo",))
@pytest.mark.parametrize("kind", ["mimo", "qwen3_5"])
def test_mtp_native_target_without_module_is_refused(kind: str, tmp_path: Path) -> None:
    made = native(kind, tmp_path / "without", module=False)
    target = target_of(made.directory)
    with pytest.raises(
        UserError, match=r"has no MTP module \(no tensor '.*; name a checkpoint that has one, drafter.source=DIR"
    ):
        FAMILY.build(MTPNativeOptions(), target)
    whole = native(kind, tmp_path / "with")
    stock = MTPNative(MTPNativeOptions(source=str(whole.directory)), target)
    assert torch.equal(stock.module.eh_proj.weight, whole.parts["eh_proj"])


def test_mtp_native_float8_module_is_refused(tmp_path: Path) -> None:
    made = native("deepseek_v3", tmp_path / "target")
    target = target_of(made.directory)
    for file in made.directory.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.layers.3.eh_proj.weight" in tensors:
            tensors["model.layers.3.eh_proj.weight"] = tensors["model.layers.3.eh_proj.weight"].to(torch.float8_e4m3fn)
            save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match="is stored as float8_e4m3fn, which is not trained; give a checkpoint in bfloat16"):
        FAMILY.build(MTPNativeOptions(), target)


def test_mtp_native_router_biases_stay_float32(tmp_path: Path) -> None:
    """As in transformers: they decide which experts are chosen."""
    drafter = MTPNative(MTPNativeOptions(), target_of(native("glm4_moe", tmp_path / "target").directory))
    narrow = drafter.to(torch.bfloat16)
    assert {b.dtype for b in narrow.buffers()} == {torch.float32}
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}


def test_mtp_native_unknown_target_or_zero_steps_is_refused() -> None:
    cases: dict[str, dict[str, Any]] = {
        "the target is a llama: layouts are known for deepseek_v3, glm4_moe": {},
        "drafter.steps is 0": {"source": "fresh", "steps": 0},
        "the target is a llama: layouts": {"source": "nowhere"},
    }
    for match, options in cases.items():
        with pytest.raises(UserError, match=match):
            FAMILY.build(MTPNativeOptions(**options), tiny_target())


@pytest.mark.parametrize(
    "kind", ["glm4_moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mimo", "deepseek_v3"))]
)
def test_mtp_native_module_per_depth_predictions_equal_draft_tokens(kind: str, tmp_path: Path) -> None:
    """What is trained is what is drafted, whatever is accepted on the way; each module sees its own keys alone."""
    target = target_of(native(kind, tmp_path / "target", twice=True).directory)
    drafter = MTPNative(MTPNativeOptions(draft_length=2), target).eval()
    assert drafter.modules_count == 2 and drafter.resolved_options()["modules"] == 2
    for seed in (2, 8):
        drafts, predicted = drafted_and_predicted(target, drafter, prompts(1, seed=seed, longest=30)[0] + [5, 9, 2])
        assert predicted == drafts
    asked = [*prompts(4, seed=3), [7], [3, 4]]
    settings: dict[str, Any] = {"max_new_tokens": 14, "prefill_chunk": 5}
    plain = Decoder(target, None, "greedy", Sampling(), **settings).run(asked, 3).results
    for every in (None, 2):  # with 2 the lengths are on the device alone
        controls = Controls(read_every=every)
        ours = Decoder(target, drafter, "greedy", Sampling(), controls=controls, **settings).run(asked, 3).results
        assert [r.tokens for r in ours] == [r.tokens for r in plain]
    batch, objective = batch_of(target, drafter.train()), Objective(drafter, target, LossOptions("ce"))
    objective(batch)[0].backward()
    assert all(p.grad is not None for p in drafter.parameters())
    with pytest.raises(UserError, match=r"drafter.draft_length is 3, and there are 2 modules, one for each depth; set it to 2"):
        MTPNative(MTPNativeOptions(), target)
    assert MTPNative(MTPNativeOptions(modules=1), target).modules_count == 1


def test_mtp_native_module_per_depth_drafts_equal_predictions_at_every_decode_step(tmp_path: Path) -> None:
    """At every step of a decoding the proposal is what `predict` makes of the text so far."""
    target = target_of(native("glm4_moe", tmp_path / "target", twice=True).directory)
    drafter = MTPNative(MTPNativeOptions(draft_length=2), target).eval()
    seen = watch_proposals(drafter)
    prompt = prompts(1, seed=4)[0]
    (result,) = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=16).run([prompt], 1).results
    text, at = prompt + result.tokens, len(prompt)
    assert len(seen) == result.verifications
    for tree in seen:
        root, *drafts = tree.token_BN[0].tolist()
        assert root == text[at]
        known = torch.tensor([[*text[: at + 1], *drafts]])
        whole = torch.ones_like(known, dtype=torch.bool)
        plain = TrainBatch(known, torch.arange(known.shape[1])[None], torch.zeros_like(known), whole)
        for prediction in drafter.predict(Online(target, drafter.taps).fill(plain)):
            index = (prediction.source_M == at - 1).nonzero()[0, 0]
            assert int(prediction.head(prediction.hidden_MH[index]).argmax()) == drafts[prediction.step]
        at += 1 + next((i for i, draft in enumerate(drafts) if text[at + 1 + i : at + 2 + i] != [draft]), len(drafts))


@pytest.mark.parametrize("found", ["qwen3_5"], indirect=True)
def test_mtp_native_mrope_is_called_with_3d_position_ids(
    found: tuple[Native, HFTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before transformers 5.23 such a module does not take them as one part."""
    _, target = found
    drafter = MTPNative(MTPNativeOptions(), target).eval()
    rotary = drafter.rotary.module
    own, shapes = rotary.forward, list[int]()

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        shapes.append(position_ids.ndim)
        return own(x, position_ids)

    batch = batch_of(target, drafter)
    wanted = [p.hidden_MH for p in drafter.predict(batch)]
    monkeypatch.setattr(rotary, "forward", forward)
    for prediction, hidden_MH in zip(drafter.predict(batch), wanted, strict=True):
        assert torch.equal(prediction.hidden_MH, hidden_MH)
    assert set(shapes) == {3}
