"""EAGLE's losses against a computation position by position; noise; and what every family must do, with dynamic trees."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.drafters.eagle import FAMILY, Eagle, EagleOptions
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective
from tests.contract import test_families as contract
from tests.helpers import tiny_target
from tests.unrolled import labels, packed_batch, shaken, states

ALL = [[a] for a in range(2)] + [[a, b] for a in range(2) for b in range(2)]
DYNAMIC = {"steps": 3, "draft_length": 3, "tree": "dynamic", "width": 2, "nodes": 10}  # every candidate is kept


def drafter_of(**options: Any) -> Eagle:
    return shaken(Eagle(EagleOptions(**options), tiny_target()))  # type: ignore[return-value]


@pytest.mark.sampled
@pytest.mark.parametrize("top_weight", [0.0, 0.7])
@pytest.mark.parametrize("steps", [1, 3])
def test_eagle_losses_and_gradients_equal_loop(steps: int, top_weight: float) -> None:
    """One forward, and three aligned ones on features that no gradient flows through."""
    drafter = drafter_of(steps=steps, top_weight=top_weight, top_k=4).train()
    target = drafter._target.module
    batch = packed_batch(drafter, target)  # type: ignore[arg-type]
    total, counts = Objective(drafter, target, LossOptions("kl", 5))(batch)
    total.backward()
    ours = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    naive = torch.zeros(())
    found = states(drafter, batch, steps, detach=True)
    for step in range(steps):
        for row, t in labels(batch, step):
            feature, wanted = found[step, row, t], batch.hidden[FINAL][row, t + 1 + step]
            p, log_q = target.head(wanted).softmax(-1), target.head(feature).log_softmax(-1)
            apart = (feature - wanted).abs()
            smooth = torch.where(apart < 1, 0.5 * apart**2, apart - 0.5).mean()
            best = p.topk(4).indices
            naive = naive + 0.1 * (p * (p.log() - log_q)).sum() + smooth - top_weight * (p[best] * log_q[best]).sum()
    naive.backward()
    torch.testing.assert_close(total, naive)
    assert counts.total.tolist() == [len(labels(batch, step)) for step in range(steps)]
    for a, p in zip(ours, drafter.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, atol=1e-5, rtol=1e-4)


def test_eagle_feature_noise_is_deterministic_and_off_in_evaluation() -> None:
    drafter = drafter_of(noise=0.1)
    batch = packed_batch(drafter, drafter._target.module)  # type: ignore[arg-type]
    clean = next(p.hidden_MH for p in drafter_of().train().predict(batch))
    noisy = [next(p.hidden_MH for p in drafter.train().predict(batch)) for _ in range(2)]
    assert torch.equal(*noisy) and not torch.allclose(noisy[0], clean)
    assert torch.equal(next(iter(drafter.eval().predict(batch))).hidden_MH, clean)
    state_BTH = torch.zeros(2, 12, 32)
    drawn = drafter.train()._noisy(state_BTH, batch)
    assert 0.9 < float(drawn.abs().max()) / (0.1 * 512 / 12) <= 1.0 and abs(float(drawn.mean())) < 0.3


def test_eagle_feature_noise_is_seeded_by_the_tokens_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum on the device would make the host wait. A device without data has no generator, so the seeds are noted."""
    drafter, seeds = drafter_of(noise=0.1).train(), list[int]()
    batch = packed_batch(drafter, drafter._target.module)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "Generator", lambda _: SimpleNamespace(manual_seed=seeds.append))
    for device in ("cpu", "meta"):
        state_BTH = torch.zeros(2, 12, 32, device=device)
        monkeypatch.setattr(torch, "rand", lambda *_, state_BTH=state_BTH, **__: state_BTH)
        drafter._noisy(state_BTH, batch.to(torch.device(device)))
    assert len(seeds) == 2 and len(set(seeds)) == 1


def test_eagle_parameters_have_official_names() -> None:
    names = {name for name, _ in drafter_of().named_parameters()}
    attention = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    mlp = {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert names == attention | mlp | {"layers.0.post_attention_layernorm.weight", "fc.weight", "fc.bias"}


def test_eagle_invalid_options_are_refused() -> None:
    target = tiny_target()
    for name, value in {"steps": 0, "top_k": 0, "tree": "oak"}.items():
        with pytest.raises(UserError, match=rf"drafter\.{name}"):
            FAMILY.build(EagleOptions(**{name: value}), target)  # type: ignore[arg-type]


@pytest.fixture
def dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.SHAPES, "eagle", DYNAMIC)


@pytest.mark.sampled(batch=(4,), noise=(1.0,))
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_eagle_dynamic_tree_greedy_output_equals_plain_decoding(noise: float, batch: int, dynamic: None) -> None:
    contract.test_drafter_greedy_output_equals_plain_decoding("eagle", noise, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        contract.test_drafter_training_predictions_equal_draft_tokens,
        contract.test_drafter_coupled_output_equals_plain_sampling,
        contract.test_drafter_depth_limit_cuts_same_draft_tree,
        contract.test_drafter_long_prompts_in_batch_output_equals_plain_decoding,
        pytest.param(contract.test_drafter_sampling_follows_target_distribution, marks=pytest.mark.grid),  # no q
        contract.test_drafter_overfitted_on_one_text_is_accepted_in_full,
    ],
)
def test_eagle_dynamic_tree_passes_family_contract(check: Any, dynamic: None) -> None:
    check("eagle")


def test_eagle_dynamic_tree_reloaded_drafts_same_tokens(tmp_path: Path, dynamic: None) -> None:
    contract.test_drafter_reloaded_checkpoint_drafts_same_tokens("eagle", tmp_path)
