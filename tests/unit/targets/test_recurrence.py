"""The states of recurrences, in chunks, against one position after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.targets.recurrent import CHUNK, delta_state, selective_state, state_space_state, steps

LONG = 2 * CHUNK + 3  # whole chunks and a part of one
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("D", [1, 6])  # of a head, and of each key channel, which forgets all within a chunk
@pytest.mark.parametrize("N", [1, LONG])
def test_delta_state_equals_step_by_step_recurrence(N: int, D: int) -> None:
    B, k_heads, heads, K, V = 2, 2, 4, 6, 5
    state, key, value = random(B, heads, K, V), F.normalize(random(B, N, k_heads, K), dim=-1), random(B, N, heads, V)
    decay, beta = -F.softplus(D * random(B, N, heads, D)), random(B, N, heads).sigmoid()
    found, key = delta_state(state, key, value, decay, beta), key.repeat_interleave(2, 2)
    for i in range(N):
        state = state * decay[:, i].exp()[..., None]
        read = (state * key[:, i, :, :, None]).sum(-2)
        state = state + key[:, i, :, :, None] * ((value[:, i] - read) * beta[:, i, :, None])[:, :, None]
    torch.testing.assert_close(found, state, **TOLERANCE)


def test_state_space_state_equals_step_by_step_recurrence() -> None:
    N, B, groups, heads, V, S = LONG, 2, 2, 4, 6, 5
    state, x, b = random(B, heads, V, S), random(B, N, heads, V), random(B, N, groups, S)
    step, rate = steps(random(B, N, heads), random(heads), True), -random(heads).exp()
    found, b = state_space_state(state, x, step, rate, b), b.repeat_interleave(2, 2)
    for i in range(N):
        state = (
            state * (step[:, i] * rate).exp()[..., None, None] + (x[:, i] * step[:, i, :, None])[..., None] * b[:, i, :, None]
        )
    torch.testing.assert_close(found, state, **TOLERANCE)


def test_selective_state_equals_step_by_step_recurrence() -> None:
    N, B, C, S = LONG, 2, 6, 5
    state, x, b = random(B, C, S), random(B, C, N), random(B, S, N)
    step, rate = steps(random(B, C, N), random(C, 1), True), -random(C, S).exp()
    found = selective_state(state, x, step, rate, b)
    for i in range(N):
        state = state * (step[..., i, None] * rate).exp() + (x[..., i] * step[..., i])[..., None] * b[:, None, :, i]
    torch.testing.assert_close(found, state, **TOLERANCE)


def test_recurrence_identity_positions_change_no_state() -> None:
    state, key, value = random(1, 2, 4, 3), F.normalize(random(1, 6, 2, 4), dim=-1), random(1, 6, 2, 3)
    decay, beta = -F.softplus(random(1, 6, 2, 1)), random(1, 6, 2).sigmoid()
    decay[:, 3:], beta[:, 3:] = 0.0, 0.0
    shorter = delta_state(state, key[:, :3], value[:, :3], decay[:, :3], beta[:, :3])
    torch.testing.assert_close(delta_state(state, key, value, decay, beta), shorter)
    x, b, step, rate = random(1, 6, 2, 3), random(1, 6, 1, 4), F.softplus(random(1, 6, 2)), -random(2).exp()
    step[:, 3:] = 0.0
    state = random(1, 2, 3, 4)
    shorter = state_space_state(state, x[:, :3], step[:, :3], rate, b[:, :3])
    torch.testing.assert_close(state_space_state(state, x, step, rate, b), shorter)


def test_recurrence_steps_are_clamped_to_limits() -> None:
    raw = torch.tensor([-20.0, 0.0, 20.0])
    assert steps(raw, None, True, (0.001, 0.1)).tolist() == pytest.approx([0.001, 0.1, 0.1])
    assert steps(raw, torch.tensor([0.0, 1.0, 0.0]), False, (-50.0, 50.0)).tolist() == [-20.0, 1.0, 20.0]
