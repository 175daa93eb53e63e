"""Batches read ahead: the same states, in order, with mistakes where they belong, and nothing left behind."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import collate
from drafttrain.features import store as stores
from drafttrain.features.cached import BUFFERS, Cached, HostBuffers, ReadAhead
from drafttrain.features.online import Online
from drafttrain.features.store import FeatureFormat, FeatureStore, ShardLayout
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import FINAL, Taps
from drafttrain.train.caching import ShardWriter
from tests.helpers import prompts, tiny_target

CPU = torch.device("cpu")


def texts() -> list[np.ndarray]:
    return [np.array(p, np.int32) for p in prompts(12, longest=20)]


def batch(rows: list[np.ndarray]) -> TrainBatch:
    return collate([Encoded(ids, np.ones(len(ids), np.bool_)) for ids in rows], 0)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FeatureStore:
    monkeypatch.setattr(stores, "MIN_SHARD_TOKENS", 24)
    monkeypatch.setattr(stores, "MIN_SHARDS", 4)
    target = tiny_target()
    form = FeatureFormat((1, FINAL), "bfloat16", target.shape.hidden_size)
    found = FeatureStore(tmp_path, ShardLayout.of(texts(), form.bytes), form, {"target": target.fingerprint})
    found.folder.mkdir(parents=True)
    ShardWriter(found, Online(target, Taps((1,))), batch, 60).write(list(found.numbers), 0, 1, lambda tokens: None)
    return found


def batches() -> list[TrainBatch]:
    """Padded rows of many lengths, a packed row, and one process's columns of it."""
    some = texts()
    joined = np.concatenate(some[:4]).astype(np.int64)
    number = np.concatenate([np.full(len(t), i) for i, t in enumerate(some[:4])])
    packed = TrainBatch(
        torch.from_numpy(joined)[None], torch.arange(len(joined))[None], torch.from_numpy(number)[None],
        torch.ones(1, len(joined), dtype=torch.bool),
    )  # fmt: skip
    part = replace(packed, **{n: getattr(packed, n)[:, 7:19] for n in ("token_BT", "position_BT", "document_BT", "mask_BT")})
    span: Any = SimpleNamespace(first=7)
    return [batch(some[:3]), batch(some[5:6]), packed, replace(part, span=span, whole=packed), batch(some[2:11])]


def same(found: TrainBatch, wanted: TrainBatch) -> None:
    assert found.hidden.keys() == wanted.hidden.keys()
    assert all(torch.equal(found.hidden[key], state) for key, state in wanted.hidden.items())
    assert torch.equal(found.token_BT, wanted.token_BT)


def reading() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("features")]


class Copies(HostBuffers):
    """Host memory without a GPU: a copy is done when its event has been waited for, and until then nobody may write."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.under_way: set[int] = set()
        self.made = 0

    def take(self, size: int) -> torch.Tensor:
        buffer = super().take(size)
        assert buffer.data_ptr() not in self.under_way, "a buffer is written while it is copied"
        return buffer.fill_(255)

    def give(self, buffer: torch.Tensor) -> None:
        self.under_way.add(buffer.data_ptr())
        super().give(buffer)

    def _allocated(self, size: int) -> torch.Tensor:
        self.made += 1
        return torch.empty(size, dtype=torch.uint8)

    def _copy_event(self) -> Any:
        newest = list(self.under_way)
        return SimpleNamespace(synchronize=lambda: self.under_way.difference_update(newest))


@pytest.mark.parametrize("buffered", [False, True])
def test_read_ahead_states_equal_serial_states(store: FeatureStore, buffered: bool) -> None:
    serial, ours, some = Cached(store, CPU, torch.float32), Cached(store, CPU, torch.float32), batches()
    copies = Copies()
    if buffered:
        ours._buffers = copies
    kept = []
    for turn in range(3):
        for number, one in enumerate(some):
            kept.append((ours.fill(one), serial.fill(one)))
            ours.begin(some[(number + 1) % len(some)])
            if turn == 1:  # another batch in between, as held-out ones are
                same(ours.fill(some[0]), serial.fill(some[0]))
    for found, wanted in kept:  # after all others have been read: nobody has written over it
        same(found, wanted)
    assert reading() and copies.made < (BUFFERS + 6 if buffered else 1)
    ours.close()
    assert not reading()
    same(ours.fill(some[3]), serial.fill(some[3]))
    assert not reading()


def test_read_ahead_error_is_raised_for_its_batch_only(store: FeatureStore) -> None:
    ours, (first, second, *_) = Cached(store, CPU, torch.float32), batches()
    unknown = batch([np.array([9, 9, 9, 9], np.int32)])
    ours.begin(unknown)
    same(ours.fill(first), Cached(store, CPU, torch.float32).fill(first))
    with pytest.raises(KeyError):
        ours.fill(unknown)
    ours.begin(unknown)
    ours.begin(second)  # the other is not asked for
    same(ours.fill(second), Cached(store, CPU, torch.float32).fill(second))
    ours.begin(unknown)
    ours.close()
    assert not reading()


def test_read_ahead_runs_calls_one_by_one() -> None:
    gate, entered, running, most = threading.Event(), threading.Event(), [0], [0]

    def make(number: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        entered.set()
        assert gate.wait(30)
        running[0] -= 1
        return 10 * number

    ahead: ReadAhead[Any, int] = ReadAhead(make, CPU)
    ahead.start(1)
    assert entered.wait(30)  # it runs while this thread goes on
    ahead.start(2)
    ahead.start(3)  # 2 has not begun and never will
    gate.set()
    assert ahead.get(3) == 30 and ahead.get(4) == 40 and most == [1]
    ahead.close()
    assert not reading()


def test_read_ahead_thread_sets_its_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: set_to.append((threading.current_thread().name, device)))
    ahead: ReadAhead[int, int] = ReadAhead(lambda number: number, torch.device("cuda", 3))
    ahead.start(1)
    assert ahead.get(1) == 1
    ahead.close()
    assert [(name.split("_")[0], device.index) for name, device in set_to] == [("features", 3)]


def test_host_buffer_is_reused_after_its_copy() -> None:
    copies, taken = Copies(), []
    for size in (100, 200, 150, 90, 400, 60):
        taken.append(copies.take(size))
        assert len(taken[-1]) >= size
        copies.give(taken[-1])
    assert [len(buffer) for buffer in taken] == [100, 200, 150, 200, 400, 200]
    assert taken[3] is taken[1] and taken[5] is taken[1]
