"""MTP's loss and gradients against a computation position by position; what is shared; what is fed back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.drafters.mtp import FAMILY, MTP, MTPOptions
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective
from tests.helpers import tiny_target
from tests.unrolled import labels, packed_batch, shaken, states


def drafter_of(**options: Any) -> MTP:
    return shaken(MTP(MTPOptions(**options), tiny_target()))  # type: ignore[return-value]


@pytest.mark.parametrize("normed", [False, True])
def test_mtp_loss_and_gradients_equal_loop(normed: bool) -> None:
    drafter = drafter_of(steps=3, step_decay=0.5, norm_output=normed).train()
    target = drafter._target.module
    batch = packed_batch(drafter, target)  # type: ignore[arg-type]
    total, counts = Objective(drafter, target, LossOptions("kl", 5))(batch)
    total.backward()
    ours = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    naive, found = torch.zeros(()), states(drafter, batch, 3, detach=False)
    for step in range(3):
        for row, t in labels(batch, step):
            p = target.head(batch.hidden[FINAL][row, t + 1 + step]).softmax(-1)
            state = found[step, row, t]
            log_q = target.head(state if normed else target.norm(state)).log_softmax(-1)
            naive = naive + 0.5**step * (p * (p.log() - log_q)).sum()
    naive.backward()
    torch.testing.assert_close(total, naive)
    assert counts.total.tolist() == [len(labels(batch, step)) for step in range(3)]
    for a, p in zip(ours, drafter.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, atol=1e-5, rtol=1e-4)


def test_mtp_input_is_normed_embedding_then_normed_state() -> None:
    drafter = drafter_of()
    module, token, state = drafter.module, torch.tensor([[3, 9]]), torch.randn(1, 2, 32)
    residual, read = drafter.enter(token, state)
    embedded = drafter._target.module.embed(token)
    halves = [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) for x in (embedded, state)]
    weight = module.eh_proj.weight
    wanted = (halves[0] * module.enorm.weight) @ weight[:, :32].T + (halves[1] * module.hnorm.weight) @ weight[:, 32:].T
    torch.testing.assert_close(residual, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(read, module.input_layernorm(residual))


def test_mtp_parameters_are_those_of_one_module() -> None:
    names = {name for name, _ in drafter_of(qk_norm=True).named_parameters()}
    attention = {f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    norms = {f"{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "input_layernorm", "post_attention_layernorm")}
    mlp = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert names == {f"module.{name}" for name in attention | norms | mlp}


def test_mtp_invalid_options_are_refused() -> None:
    target = tiny_target()
    for name, value in {"steps": 0, "step_decay": 0.0, "tree": "best_first"}.items():
        with pytest.raises(UserError, match=rf"drafter\.{name}"):
            FAMILY.build(MTPOptions(**{name: value}), target)  # type: ignore[arg-type]
