"""Attention over whole sequences: against all scores at once, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.model import causal_attention as op
from drafttrain.model.masks import Documents

DOCUMENTS = Documents(torch.tensor([[0] * 9 + [1] * 12 + [-1] * 2, [0] * 23]))


@pytest.mark.parametrize("rows", [4, 512])  # blocks, the last one short, or all at once
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 4e-2)])
def test_as_all_scores_at_once(
    dtype: torch.dtype,
    close: float,
    documents: Documents | None,
    window: int | None,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "ROWS", rows)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 23, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    weight = torch.randn(2, 4, 23, 8, dtype=dtype)

    def run(found: Tensor) -> tuple[Tensor, ...]:
        return found, *torch.autograd.grad((found * weight).sum(), [q, k, v])

    ours, naive = (run(function(q, k, v, documents, window, 0.3)) for function in (op.causal, op.reference))
    for a, b in zip(ours, naive, strict=True):
        torch.testing.assert_close(a, b, atol=close, rtol=close)
