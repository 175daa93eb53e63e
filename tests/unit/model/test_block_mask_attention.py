"""FlexAttention's mask, its tiles and its result on a CPU, against the dense mask and against the tiles that a CPU computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask, flex_attention

from drafttrain.model import blockwise_attention as blockwise
from drafttrain.model.batch import Context, TrainBatch
from drafttrain.model.blockwise_attention import TILE, Rule, block_mask_attention, blockwise_attention, mask_of, tiles
from drafttrain.train.telemetry import Flops

COLUMNS, BLOCKS, SLOTS = 200, 40, 8
RULES = [Rule(), Rule(chained=True), Rule(chained=True, window=20), Rule(window=5, scale=0.3)]


def context() -> Context:
    """A row of two documents, and a row whose first block sees nothing."""
    first_2A = torch.tensor([[0] * 30 + [80] * 10, [0] * BLOCKS])
    last_2A = torch.stack([torch.cat([torch.arange(2, 62, 2), torch.arange(85, 185, 10)]), torch.arange(BLOCKS) * 5 - 1])
    return Context(first_2A, last_2A)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_block_mask_equals_dense_mask_and_is_covered_by_tiles(rule: Rule) -> None:
    queries, keys = BLOCKS * SLOTS, COLUMNS + BLOCKS * SLOTS
    dense_BQK = blockwise._mask(context(), BLOCKS, SLOTS, COLUMNS, rule)
    seen = mask_of(context(), SLOTS, COLUMNS, rule.chained, rule.window)
    assert torch.equal(create_mask(seen, 2, 1, queries, keys, device="cpu")[:, 0], dense_BQK)
    padded = F.pad(dense_BQK, (0, -keys % TILE, 0, -queries % TILE))
    needed_BIJ = padded.unflatten(1, (-1, TILE)).unflatten(3, (-1, TILE)).any(4).any(2)
    found_BIJ = tiles(context(), BLOCKS, SLOTS, COLUMNS)
    assert bool((found_BIJ | ~needed_BIJ).all())
    assert rule.window is not None or torch.equal(found_BIJ, needed_BIJ)


@pytest.mark.sampled
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_block_mask_attention_equals_tiled_attention(rule: Rule, kv_heads: int, sinks: bool) -> None:
    torch.manual_seed(0)
    seen = Context(context().first_BA[:, ::2], context().last_BA[:, ::2])
    queries = (2, 4, BLOCKS // 2, SLOTS, 16)
    slots, text = (2, kv_heads, *queries[2:]), (2, kv_heads, COLUMNS, 16)
    inputs = [torch.randn(size) for size in (queries, slots, slots, text, text)]
    with torch.no_grad():  # FlexAttention has no gradient on a CPU
        sinks_h = torch.linspace(-2, 3, 4) if sinks else None
        wanted = blockwise_attention(*inputs, seen, rule, sinks_h)
        found = block_mask_attention(*inputs, seen, rule.chained, rule.window, rule.scale, flex_attention, sinks_h)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(blockwise._tiled(*inputs, seen, rule, sinks_h), wanted, atol=1e-5, rtol=1e-5)


def test_blockwise_attention_uses_tiles_while_flops_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decided then: the next step uses the kernel."""
    asked = list[torch.device]()
    monkeypatch.setattr(blockwise, "_has_kernel", lambda device, *_: asked.append(device) or True)
    queries: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 2, 3, 4, 16))
    grid_BT = torch.zeros(1, 4, dtype=torch.long)
    with Flops().counting(TrainBatch(grid_BT, grid_BT, grid_BT, grid_BT.bool())):
        assert not blockwise._by_kernel(queries)
    assert not asked
    assert blockwise._by_kernel(queries)


def test_blockwise_attention_flex_failure_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(blockwise, "block_mask_attention", broken)
    blockwise._has_kernel.cache_clear()
    with pytest.warns(UserWarning, match="FlexAttention is not used for blocks of slots, tiles are: no compiler$"):
        assert not blockwise._has_kernel(torch.device("cpu"), torch.float32, 16)
    blockwise._has_kernel.cache_clear()


def test_blockwise_attention_wrong_flex_result_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*inputs: torch.Tensor, sinks_h: torch.Tensor | None = None) -> torch.Tensor:
        factor = 2.0 if sinks_h is None else 1.0
        return factor * blockwise._tiled(*inputs, sinks_h=sinks_h)  # type: ignore[arg-type]

    monkeypatch.setattr(blockwise, "block_mask_attention", wrong)
    blockwise._has_kernel.cache_clear()
    with pytest.warns(UserWarning, match="apart"):
        assert not blockwise._has_kernel(torch.device("cpu"), torch.float32, 16)
    assert blockwise._has_kernel(torch.device("cpu"), torch.float32, 16, True), "sinks are asked for apart"
    blockwise._has_kernel.cache_clear()
