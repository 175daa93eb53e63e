"""The cache against plain lists."""

import pytest
import torch

from drafttrain.core.tree import ancestors
from drafttrain.model.kv_cache import KVCache
from drafttrain.ops.tree_attention import visible


def numbered(rows: int, nodes: int, start: int) -> torch.Tensor:
    return (start + torch.arange(rows * nodes).float()).view(rows, 1, nodes, 1).expand(rows, 2, nodes, 3).contiguous()


def test_kv_cache_keep_moves_accepted_path_after_prefix() -> None:
    kv = KVCache(1, slots=3, max_len=12)
    kv.append(0, numbered(3, 5, 0), numbered(3, 5, 100))
    kv.keep(torch.arange(5).expand(3, 5), torch.tensor([5, 3, 1]))
    kv.rows(torch.tensor([0, 2]))
    kv.append(0, numbered(2, 4, 50), numbered(2, 4, 150))
    kv.keep(torch.tensor([[0, 1, 3], [0, 2, 0]]), torch.tensor([3, 2]))
    assert kv.lengths(torch.arange(3)).tolist() == [8, 3, 3]
    kv.rows(torch.arange(3))
    kv.append(0, numbered(3, 1, 900), numbered(3, 1, 990))
    keys, values = kv.read(0, 1)
    assert keys[0, 0, :9, 0].tolist() == [0, 1, 2, 3, 4, 50, 51, 53, 900]
    assert keys[1, 1, :4, 0].tolist() == [5, 6, 7, 901]
    assert keys[2, 0, :4, 0].tolist() == [10, 54, 56, 902]
    assert values[0, 1, 5:8, 2].tolist() == [150, 151, 153]


def test_kv_cache_keep_reads_before_it_writes() -> None:
    kv = KVCache(1, 1, 8)
    kv.append(0, numbered(1, 4, 0), numbered(1, 4, 0))
    kv.keep(torch.tensor([[0, 2, 3]]), torch.tensor([3]))
    kv.append(0, numbered(1, 1, 9), numbered(1, 1, 9))
    keys, _ = kv.read(0, 1)
    assert keys[0, 0, :, 0].tolist() == [0, 2, 3, 9]


def test_kv_cache_crop_and_reset_shorten_rows() -> None:
    kv = KVCache(1, 2, 8)
    kv.append(0, numbered(2, 4, 0), numbered(2, 4, 0))
    kv.keep(torch.arange(4).expand(2, 4), torch.tensor([4, 4]))
    kv.crop(torch.tensor([2, 3]))
    assert kv.lengths(torch.arange(2)).tolist() == [2, 3]
    kv.reset(torch.tensor([1]))
    assert kv.lengths(torch.arange(2)).tolist() == [2, 0]


def test_kv_cache_ensure_room_beyond_capacity_is_refused() -> None:
    kv = KVCache(1, 1, 4)
    with pytest.raises(ValueError, match="exceed the cache's 4"):
        kv.ensure_room(5)


def test_visible_keys_are_prefix_and_ancestors() -> None:
    ancestor = ancestors(torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 1]]))
    seen = visible(torch.tensor([5, 2]), 5, ancestor)
    assert seen.shape == (2, 4, 9)
    assert seen[0, 3].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert seen[1, 3].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 5]
    assert seen[1, 0].nonzero()[:, 0].tolist() == [0, 1, 2]


def test_kv_cache_bounded_slot_cropped_too_far_is_refused() -> None:
    kv = KVCache(1, 2, 4096, kept=600, back=512)
    kv.allocate(1, 4, torch.float32)
    kv.rows(torch.tensor([0]))
    for length in (500, 1000, 488, 1001):
        kv.crop(torch.tensor([length]))
    with pytest.raises(AssertionError, match="overwritten"):
        kv.crop_slot(0, 488)
