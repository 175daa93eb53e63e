"""Attention of blocks in tiles against a dense mask: values and gradients, for every rule."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import peak
from drafttrain.model import blockwise_attention as blockwise
from drafttrain.model.batch import Context
from drafttrain.model.blockwise_attention import Rule, blockwise_attention
from tests.cases import with_grid

COLUMNS, BLOCKS, SLOTS = 37, 7, 3
RULES = (Rule(), Rule(chained=True), CUT := Rule(chained=True, window=5), Rule(scale=0.3))
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}
FEW = [
    (torch.float64, Rule(), 2, 3, False),
    (torch.float64, Rule(chained=True), 4, 6, False),
    (torch.float64, CUT, 1, 64, False),
    (torch.float64, Rule(scale=0.3), 2, 6, False),
    (torch.float64, Rule(), 1, 3, False),
    (torch.float64, Rule(), 4, 3, False),
    (torch.float32, CUT, 2, 3, False),
    (torch.bfloat16, CUT, 2, 3, False),
    (torch.float64, Rule(scale=0.3), 4, 3, True),
    (torch.float64, CUT, 2, 6, True),
    (torch.bfloat16, Rule(), 1, 64, True),
]


@cache
def seen() -> Context:
    generator = torch.Generator().manual_seed(0)
    first_BA = torch.randint(0, 9, (2, BLOCKS), generator=generator).sort(1).values
    return Context(first_BA, first_BA + torch.randint(0, 28, (2, BLOCKS), generator=generator))


@cache
def dense(rule: Rule) -> Tensor:
    """[B, A S, T + A S] which keys every slot sees, one slot at a time."""
    mask = torch.zeros(2, BLOCKS * SLOTS, COLUMNS + BLOCKS * SLOTS, dtype=torch.bool)
    for row in range(2):
        for block in range(BLOCKS):
            first, last = int(seen().first_BA[row, block]), int(seen().last_BA[row, block])
            for slot in range(SLOTS):
                place = last + 1 + slot
                for column in range(first, last + 1):
                    mask[row, block * SLOTS + slot, column] = rule.window is None or place - column < rule.window
                for other in range(slot + 1 if rule.chained else SLOTS):
                    near = rule.window is None or slot - other < rule.window
                    mask[row, block * SLOTS + slot, COLUMNS + block * SLOTS + other] = near
    return mask


# least: slots of a tile: 1 or 2 blocks, the last tile short, or all
@pytest.mark.parametrize(
    ("dtype", "rule", "kv_heads", "least", "sinks"), with_grid(FEW, CLOSE, RULES, (4, 2, 1), (3, 6, 64), (False, True))
)
def test_blockwise_attention_tiles_equal_dense_mask(
    dtype: torch.dtype, rule: Rule, kv_heads: int, least: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "LEAST_TILE", least)
    torch.manual_seed(0)
    q = torch.randn(2, 4, BLOCKS, SLOTS, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, BLOCKS, SLOTS, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    context = [torch.randn(2, kv_heads, COLUMNS, 8, dtype=dtype, requires_grad=True) for _ in range(2)]
    weight = torch.randn(2, 4, BLOCKS, SLOTS, 8, dtype=dtype)
    sinks_h = torch.linspace(-2, 3, 4).to(dtype).requires_grad_() if sinks else None

    def plain() -> Tensor:
        both = [torch.cat([c, x.flatten(2, 3)], 2) for c, x in zip(context, (k, v), strict=True)]
        keys, values = (x.repeat_interleave(4 // kv_heads, 1) for x in both)
        mask = dense(rule)[:, None]
        if sinks_h is None:
            return F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, mask, scale=rule.scale).view(q.shape)
        scores = (q.flatten(2, 3) @ keys.transpose(-1, -2) * (rule.scale or 8**-0.5)).masked_fill(~mask, -torch.inf)
        column = sinks_h.view(-1, 1, 1).expand(2, -1, scores.shape[2], -1)
        return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ values).view(q.shape)

    inputs = [q, k, v, *context, *([] if sinks_h is None else [sinks_h])]
    for ours, wanted in zip(*(
        [out, *torch.autograd.grad((out * weight).sum(), inputs)]
        for out in (blockwise_attention(q, k, v, *context, seen(), rule, sinks_h), plain())
    ), strict=True):  # fmt: skip
        torch.testing.assert_close(ours, wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_blockwise_attention_without_context_equals_sdpa() -> None:
    q, k, v = (torch.randn(1, 2, 2, 3, 8) for _ in range(3))
    none_12 = torch.zeros(1, 2, dtype=torch.long)
    out = blockwise_attention(q, k, v, torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), Context(none_12, none_12 - 1))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


def test_blockwise_attention_peak_memory_is_linear_in_length() -> None:
    """From where its tiles do not grow any more."""

    def most(length: int) -> int:
        blocks = length // 16
        own = [torch.randn(1, 1, blocks, 16, 64).requires_grad_() for _ in range(3)]
        context = [torch.randn(1, 1, length, 64).requires_grad_() for _ in range(2)]
        anchor_1A = torch.linspace(0, length - 1, blocks).long()[None]
        seen = Context(torch.zeros_like(anchor_1A), anchor_1A)
        inputs = [*own, *context]

        def gradients() -> object:
            out = blockwise_attention(*inputs, seen)
            return torch.autograd.grad(out, inputs, torch.ones_like(out))

        gradients()
        return peak(gradients)

    assert most(2048) < 2.1 * most(1024)
