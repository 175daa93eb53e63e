"""Attention over whole sequences: against all scores at once, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.model import causal_attention as op
from drafttrain.model.masks import Documents
from tests.cases import with_grid

DOCUMENTS = Documents(torch.tensor([[0] * 9 + [1] * 12 + [-1] * 2, [0] * 23]))
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}
# window and queries of a block: only texts longer than the window are divided, the last block short, or all at once
SPANS = ((None, 512), (40, 512), (1, 4), (5, 4))
FEW = [(torch.float64, documents, span) for documents in (None, DOCUMENTS) for span in SPANS]
FEW += [(dtype, DOCUMENTS, (5, 4)) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("dtype", "documents", "span"), with_grid(FEW, CLOSE, (None, DOCUMENTS), (*SPANS, (1, 512), (5, 512))))
def test_causal_attention_equals_reference(
    dtype: torch.dtype, documents: Documents | None, span: tuple[int | None, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    window, rows = span
    monkeypatch.setattr(op, "ROWS", rows)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 23, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    weight = torch.randn(2, 4, 23, 8, dtype=dtype)

    def run(found: Tensor) -> tuple[Tensor, ...]:
        return found, *torch.autograd.grad((found * weight).sum(), [q, k, v])

    ours, naive = (run(function(q, k, v, documents, window, 0.3)) for function in (op.causal, op.reference))
    for a, b in zip(ours, naive, strict=True):
        torch.testing.assert_close(a, b, atol=CLOSE[dtype], rtol=CLOSE[dtype])
