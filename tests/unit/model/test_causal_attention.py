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


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, *more: object, scale: float, window_size: tuple[int, int]
) -> Tensor:
    """torch's attention of variable lengths, which runs on a GPU alone: [X, h, D], as many heads of keys as of queries."""
    assert q.shape == k.shape and start.dtype == torch.int32 and window_size[1] == 0 and more[0] is start
    assert more[1:] == (int(start.diff().max()),) * 2
    parts = []
    for first, end in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        one = (x[first:end].transpose(0, 1)[None] for x in (q, k, v))
        window = None if window_size[0] < 0 else window_size[0] + 1
        parts.append(op.reference(*one, window=window, scale=scale)[0].transpose(0, 1))
    return torch.cat(parts)


def with_shared_keys(q: Tensor, k: Tensor, v: Tensor, *starts: object, enable_gqa: bool, **more: object) -> Tensor:
    assert enable_gqa and q.shape[1] == 2 * k.shape[1]
    return one_by_one(q, *(x.repeat_interleave(2, 1) for x in (k, v)), *starts, **more)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("varlen_attn", [one_by_one, with_shared_keys])
def test_packed_documents_in_one_call_equal_reference(
    varlen_attn: object, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(op, "_packs", lambda q: True)
    monkeypatch.setattr(op, "by_document", None)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 23, 8, dtype=torch.float64) for heads in (4, 2, 2))
    torch.testing.assert_close(op.causal(q, k, v, DOCUMENTS, window, 0.3), op.reference(q, k, v, DOCUMENTS, window, 0.3))
