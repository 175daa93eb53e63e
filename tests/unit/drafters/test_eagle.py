"""EAGLE's losses against a computation position by position; noise; and what every family must do, with dynamic trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.drafters.eagle import Eagle, EagleOptions
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
def test_losses_and_gradients_are_those_of_a_loop(steps: int, top_weight: float) -> None:
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


def test_noise_is_a_function_of_the_batch_and_of_training_alone() -> None:
    drafter = drafter_of(noise=0.1)
    batch = packed_batch(drafter, drafter._target.module)  # type: ignore[arg-type]
    clean = next(p.hidden_MH for p in drafter_of().train().predict(batch))
    noisy = [next(p.hidden_MH for p in drafter.train().predict(batch)) for _ in range(2)]
    assert torch.equal(*noisy) and not torch.allclose(noisy[0], clean)
    assert torch.equal(next(iter(drafter.eval().predict(batch))).hidden_MH, clean)
    state_BTH = torch.zeros(2, 12, 32)
    drawn = drafter.train()._noisy(state_BTH, batch)
    assert 0.9 < float(drawn.abs().max()) / (0.1 * 512 / 12) <= 1.0 and abs(float(drawn.mean())) < 0.3


def test_parameters_have_the_official_names() -> None:
    names = {name for name, _ in drafter_of().named_parameters()}
    attention = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    mlp = {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert names == attention | mlp | {"layers.0.post_attention_layernorm.weight", "fc.weight", "fc.bias"}


def test_eagle_invalid_options_are_refused() -> None:
    target = tiny_target()
    for name, value in {"steps": 0, "top_k": 0, "tree": "oak"}.items():
        with pytest.raises(UserError, match=rf"drafter\.{name}"):
            Eagle(EagleOptions(**{name: value}), target)  # type: ignore[arg-type]


@pytest.fixture
def dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.SHAPES, "eagle", DYNAMIC)


@pytest.mark.sampled(batch=(4,), noise=(1.0,))
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_with_a_dynamic_tree_greedy_output_is_plain_decodings(noise: float, batch: int, dynamic: None) -> None:
    contract.test_greedy_output_is_plain_decodings("eagle", noise, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        contract.test_what_is_trained_is_what_is_drafted,
        contract.test_coupled_output_is_plain_samplings_token_for_token,
        contract.test_a_depth_limit_is_kept_and_drafts_the_same_tokens,
        contract.test_long_prompts_enter_beside_rows_that_are_nearly_done,
        pytest.param(contract.test_sampling_follows_the_targets_law_through_the_whole_loop, marks=pytest.mark.grid),  # no q
        contract.test_overfitted_on_one_text_it_is_accepted_in_full,
    ],
)
def test_with_a_dynamic_tree_it_does_what_every_family_must(check: Any, dynamic: None) -> None:
    check("eagle")


def test_a_dynamic_tree_is_saved_and_loaded(tmp_path: Path, dynamic: None) -> None:
    contract.test_saved_and_loaded_it_drafts_the_same("eagle", tmp_path)
