"""Attention with soft caps, sinks and windows equals its formula, however the queries are divided."""

from __future__ import annotations

import pytest
import torch

from drafttrain.model import causal_attention as module
from drafttrain.model.causal_attention import capped_attention
from tests.cases import with_grid

# scores: in memory at once, of one query, of some, the last part short, or of all unless a window divides them
CAPS = (SINKS := (None, True), CAP := (2.0, False), BOTH := (1.5, True))
FEW = [(1, None, SINKS), (20_000, 1, CAP), (20_000, None, BOTH), (2**24, 5, CAP), (2**24, 70, BOTH)]


@pytest.mark.parametrize(("scores", "window", "capped"), with_grid(FEW, (1, 20_000, 2**24), (None, 1, 5, 70), CAPS))
def test_capped_attention_equals_formula(
    scores: int, window: int | None, capped: tuple[float | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    cap, sinks = capped
    monkeypatch.setattr(module, "SCORES", scores)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, t, 6, generator=generator) for n, t in ((6, 67), (3, 90), (3, 90)))
    sink = torch.randn(6, generator=generator) if sinks else None
    at = torch.arange(23, 90)[:, None] - torch.arange(90)
    seen = (at >= 0) & (at < (window or 1000))
    score = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.4
    score = score if cap is None else cap * torch.tanh(score / cap)
    weight = score.masked_fill(~seen, -torch.inf).exp()
    total = weight.sum(-1, keepdim=True) + (0.0 if sink is None else sink.exp().view(1, 6, 1, 1))
    wanted = weight / total @ v.repeat_interleave(2, 1)
    for mask in (None, seen.expand(2, -1, -1)):
        found = capped_attention(q, k, v, 0.4, window, cap, sink, mask)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
