"""Attention of a prompt's chunk against the masked form, and the reading of one row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.model import attention
from drafttrain.model.causal_attention import chunk_attention
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.kv_storage import PAGE
from drafttrain.model.masks import attention_mask
from drafttrain.targets.fast import FastTarget
from tests.cases import with_grid
from tests.helpers import tiny_model

HEADS, KV_HEADS, WIDTH = 6, 2, 10
LENGTHS = ((0,), (70,), (0, 0), (33, 33), (97, 0, 64))
FEW = [  # no prefix or one, rows that are ragged or not, a window that is shorter than the text or not
    ((0,), 65, None),
    ((0, 0), 131, 5),
    ((70,), 131, None),
    ((70,), 65, 5),
    ((33, 33), 65, 200),
    ((97, 0, 64), 65, None),
    ((97, 0, 64), 131, 5),
]


def filled(lengths: Sequence[int], nodes: int, pool: int | None = None, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache with random prefixes of these lengths, and `nodes` scratch positions; NaN everywhere else.

    pool: pages come from a pool, in its order (1), in reverse (-1), or shuffled (0); None: every slot has its own.
    """
    slots, most = len(lengths), max(lengths) + nodes
    kv = KVCache(1, slots, most, pages=None if pool is None else slots * (most // PAGE + 1))
    kv.allocate(KV_HEADS, WIDTH, dtype)
    if pool is not None:
        free = kv.storage.free  # type: ignore[attr-defined]
        free.sort(key=(lambda page: -pool * page) if pool else (lambda page: page * 7 % 11))
        for slot in range(slots):
            kv.reserve(slot, most)
    kv.storage.stores[0].fill_(torch.nan)  # type: ignore[attr-defined]
    kv.append(0, *random(slots, max(lengths) or 1, dtype))
    kv.extend(lengths)
    kv.append(0, *random(slots, nodes, dtype))
    return kv


def random(rows: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, rows, KV_HEADS, positions, WIDTH).to(dtype)
    return keys, values


def masked(q_BNhD: Tensor, kv: KVCache, window: int | None) -> Tensor:
    """The twin of `chunk_attention`: all keys read out, and a dense mask."""
    N = q_BNhD.shape[1]
    position_BN = kv.length_B[:, None] + torch.arange(N)
    mask_BNP = attention_mask(kv, None, position_BN, window)
    keys, values = (x.nan_to_num().float().repeat_interleave(HEADS // KV_HEADS, 1) for x in kv.read(0, N))
    return F.scaled_dot_product_attention(q_BNhD.transpose(1, 2).float(), keys, values, mask_BNP[:, None]).transpose(1, 2)


@pytest.mark.parametrize(("lengths", "nodes", "window"), with_grid(FEW, LENGTHS, (65, 131), (None, 5, 200)))
@torch.inference_mode()
def test_chunk_attention_equals_masked_attention(lengths: tuple[int, ...], nodes: int, window: int | None) -> None:
    torch.manual_seed(0)
    kv = filled(lengths, nodes)
    q_BNhD = torch.randn(len(lengths), nodes, HEADS, WIDTH)
    found = chunk_attention(q_BNhD, kv, 0, None, window)
    torch.testing.assert_close(found, masked(q_BNhD, kv, window), atol=2e-6, rtol=1e-5)


@torch.inference_mode()
def test_chunk_attention_scale_and_bfloat16_equal_masked_attention() -> None:
    torch.manual_seed(0)
    kv = filled([70], 65)
    q_BNhD = torch.randn(1, 65, HEADS, WIDTH)
    scaled = chunk_attention(q_BNhD, kv, 0, 0.7)
    torch.testing.assert_close(scaled, masked(0.7 * WIDTH**0.5 * q_BNhD, kv, None), atol=2e-6, rtol=1e-5)
    low = filled([70, 3], 65, dtype=torch.bfloat16)
    q_BNhD = torch.randn(2, 65, HEADS, WIDTH).bfloat16()
    torch.testing.assert_close(chunk_attention(q_BNhD, low, 0).float(), masked(q_BNhD, low, None), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("pool", [1, 0, -1])
@torch.inference_mode()
def test_chunk_attention_over_scattered_pages_equals_masked_attention(pool: int) -> None:
    torch.manual_seed(0)
    kv = filled([70, 9, 40], 65, pool)
    q_BNhD = torch.randn(3, 65, HEADS, WIDTH)
    torch.testing.assert_close(chunk_attention(q_BNhD, kv, 0), masked(q_BNhD, kv, None), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("pool", "view"), [(None, True), (1, True), (-1, False)])
def test_kv_cache_read_row_of_contiguous_pages_is_view(pool: int | None, view: bool) -> None:
    kv = filled([70, 9], 65, pool)
    store = kv.storage.stores[0].untyped_storage().data_ptr()  # type: ignore[attr-defined]
    every = kv.read(0, 65)
    for row, length in enumerate((70, 9)):
        for whole, own in zip(every, kv.read_row(0, row, 65), strict=True):
            assert torch.equal(own, whole[row, :, : length + 65])
            assert (own.untyped_storage().data_ptr() == store) == view


def test_kv_cache_extend_equals_keep() -> None:
    kept, extended = (filled([4, 7], 66) for _ in range(2))
    kept.keep(torch.arange(66).expand(2, 66), torch.tensor([66, 3]))
    extended.extend([66, 3])
    for kv in (kept, extended):
        assert kv.length_B.tolist() == [70, 10] and kv.longest == 70 and not kv.equal_lengths


@pytest.mark.sampled(name=["llama", "mistral-sliding"])  # norms of queries and keys are no other attention
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen3"])
@torch.inference_mode()
def test_fast_target_prefill_in_chunks_needs_no_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks after a prefix give the logits of one pass without a cache."""
    from drafttrain.model.target import Taps

    target = FastTarget(tiny_model(name), frozenset())  # type: ignore[arg-type]
    token_BT = torch.randint(0, 64, (2, 300), generator=torch.Generator().manual_seed(0))
    position_BT = torch.arange(300).expand(2, 300)
    wanted = target(token_BT, None, None, position_BT, Taps()).logits_BRV
    monkeypatch.setattr(attention, "attention_mask", None)
    kv, found = target.new_cache(2, 300), []
    for start, stop in ((0, 128), (128, 193), (193, 300)):
        at = slice(start, stop)
        found.append(target(token_BT[:, at], kv, None, position_BT[:, at], Taps()).logits_BRV)
        kv.extend([stop - start] * 2)
    torch.testing.assert_close(torch.cat(found, 1), wanted, atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]
