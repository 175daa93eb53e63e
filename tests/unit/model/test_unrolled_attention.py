"""Attention of training on own outputs: against all scores at once, values and gradients, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from drafttrain.model import unrolled_attention as op
from drafttrain.model.masks import Documents
from drafttrain.ops import later_steps
from tests.cases import with_grid

DOCUMENTS = Documents(torch.tensor([[0] * 5 + [1] * 6 + [-1] * 2, [0] * 13]))
SHORT = Documents(torch.tensor([[0, 0, 1, 1, 1, -1], [0] * 6]))
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}
# rows: by the fused kernel; in blocks, the last one short, or all at once. The kernel has no window
FEW = [
    (torch.float64, 1, None, None, None, 4, False),
    (torch.float64, 4, None, DOCUMENTS, None, 2, True),
    (torch.float32, 2, 4, DOCUMENTS, 4, 2, False),
    (torch.float64, 2, 9, DOCUMENTS, None, 1, False),
    (torch.bfloat16, 2, None, None, None, 1, False),
    (torch.bfloat16, 4, 9, None, 256, 1, False),
    (torch.float64, 4, None, DOCUMENTS, None, 2, False),
    (torch.float64, 1, None, None, None, 4, True),
    (torch.float64, 2, 4, None, 4, 2, True),
    (torch.bfloat16, 2, 9, DOCUMENTS, None, 1, True),
]


@pytest.mark.parametrize(
    ("dtype", "steps", "window", "documents", "rows", "kv_heads", "sinks"),
    with_grid(FEW, CLOSE, (1, 2, 4), (None, 4, 9), (None, DOCUMENTS), (None, 4, 256), (4, 2, 1), (False, True)),
)
def test_unrolled_attention_equals_reference(
    dtype: torch.dtype,
    steps: int,
    window: int | None,
    documents: Documents | None,
    rows: int | None,
    kv_heads: int,
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if rows is not None:
        monkeypatch.setattr(op, "ROWS", rows)
        monkeypatch.setattr(op, "_kernel", lambda q_BhTD, window: None)
    torch.manual_seed(0)
    monkeypatch.setattr(later_steps, "DOT", 5)
    q = torch.randn(2, 4, 13, 8, dtype=dtype, requires_grad=True)
    both = [torch.randn(2, kv_heads, 13, 8, dtype=dtype, requires_grad=True) for _ in range(2 * steps)]
    weight = torch.randn(2, 4, 13, 8, dtype=dtype)
    sinks_h = torch.linspace(-2, 3, 4).to(dtype).requires_grad_() if sinks else None

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = function(q, both[:steps], both[steps:], documents, window, sinks_h)
        return out, *torch.autograd.grad((out * weight).sum(), [q, *both, *([] if sinks_h is None else [sinks_h])])

    for ours, naive in zip(run(op.unrolled), run(op.reference), strict=True):
        torch.testing.assert_close(ours, naive, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("documents", [None, SHORT])
def test_unrolled_attention_passes_gradcheck(documents: Documents | None) -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(2, 1, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(5)]
    assert torch.autograd.gradcheck(lambda q, *both: op.unrolled(q, both[:2], both[2:], documents), tensors)


def test_unrolled_attention_saved_tensors_grow_linearly() -> None:
    def kept(length: int) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            tensors = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(5)]
            op.unrolled(tensors[0], tensors[1:3], tensors[3:], Documents(torch.zeros(1, length, dtype=torch.long)))
        return sum(sizes)

    assert kept(600) == 2 * kept(300)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_unrolled_attention_gpu_kernels_equal_reference(subtests: pytest.Subtests) -> None:
    there, close = Documents(DOCUMENTS.number_BT.cuda()), {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
    for dtype, documents, kv_heads, sinks in product(close, (None, there), (4, 2), (False, True)):
        with subtests.test(dtype=dtype, documents=documents is not None, kv_heads=kv_heads, sinks=sinks):
            torch.manual_seed(0)
            heads = [4, *[kv_heads] * 6]
            q, *both = (torch.randn(2, h, 13, 64, dtype=dtype, device="cuda", requires_grad=True) for h in heads)
            sinks_h = torch.linspace(-2, 3, 4, dtype=dtype, device="cuda", requires_grad=True) if sinks else None
            found = [f(q, both[:3], both[3:], documents, None, sinks_h) for f in (op.unrolled, op.reference)]
            inputs = [q, *both, *([] if sinks_h is None else [sinks_h])]
            slopes = [torch.autograd.grad(out.float().square().sum(), inputs) for out in found]
            torch.testing.assert_close(*found, atol=close[dtype], rtol=close[dtype])
            for ours, naive in zip(*slopes, strict=True):
                torch.testing.assert_close(ours, naive, atol=4 * close[dtype], rtol=4 * close[dtype])
