"""The client of Mooncake's store: against a real master and another process over TCP, and its buffer by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.features import mooncake_store
from drafttrain.features.mooncake_store import SUSPECT, Buffer, MissingError, MooncakeStore, StoreError, StoreSettings
from tests.standin.mooncake import Master, Producer, content, free_port, needs_mooncake

MIB = 2**20


@pytest.fixture
def master() -> Iterator[Master]:
    master = Master(f"127.0.0.1:{free_port()}").start()
    yield master
    master.kill()


@pytest.fixture
def producer(master: Master) -> Iterator[Producer]:
    producer = Producer(master.address)
    yield producer
    producer.kill()


@pytest.fixture
def store(master: Master) -> Iterator[MooncakeStore]:
    store = MooncakeStore(StoreSettings(master.address, buffer=4 * MIB))
    yield store
    store.close()


@needs_mooncake
@pytest.mark.slow
def test_mooncake_store_reads_and_removes_objects(store: MooncakeStore, producer: Producer) -> None:
    for i in range(12):
        assert producer.put(f"run-{i}", MIB + i, i) == 0
    assert store.exists("run-0", "other") == [True, False]
    assert store.size("run-3") == MIB + 3
    with ThreadPoolExecutor(12) as threads:  # of which four have room at a time, at most
        found = list(threads.map(lambda i: store.get(f"run-{i}", MIB + i), range(12)))
    assert all(torch.equal(one, content(MIB + i, i)) for i, one in enumerate(found))
    for wrong in (MIB, MIB + 99):
        with pytest.raises(StoreError, match="bytes, not"):
            store.get("run-1", wrong)
    store.remove("run-0", "other")
    with pytest.raises(MissingError):
        store.get("run-0", MIB)
    assert store.remove_matching("^run-") == 11
    assert store.exists("run-1") == [False]
    with pytest.raises(UserError, match="buffer"):
        store.get("run-0", 5 * MIB)


@needs_mooncake
@pytest.mark.slow
def test_mooncake_store_wait_ends_by_object_timeout_or_close(
    store: MooncakeStore, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingError, match="in time"):
        store.wait(["never"], time.monotonic() + 0.05, threading.Event())
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(store.wait, ["error", "late"], time.monotonic() + 60, threading.Event())
        producer.put("late", 10)
        assert waiting.result() == "late"
    closed = threading.Event()
    closed.set()
    monkeypatch.setattr(mooncake_store, "ENDING", 0.05)
    with pytest.raises(MissingError):
        store.wait(["never"], time.monotonic() + 60, closed)


def test_mooncake_store_wait_finds_object_put_after_close() -> None:
    """Else it would stay: its request was answered, and nothing asks for it again."""

    class Slow(MooncakeStore):
        """A store in which the object appears at the third look."""

        def __init__(self) -> None:
            self.looks = 0

        def exists(self, *keys: str) -> list[bool]:
            self.looks += 1
            return [False, self.looks >= 3]

    closed = threading.Event()
    closed.set()
    assert Slow().wait(["late:error", "late"], time.monotonic() + 60, closed) == "late"


@needs_mooncake
@pytest.mark.slow
def test_mooncake_store_recovers_after_producer_and_master_are_killed(
    store: MooncakeStore, producer: Producer, master: Master
) -> None:
    producer.put("one", MIB)
    assert store.size("one") == MIB
    producer.kill()
    with pytest.raises(StoreError):
        store.get("one", MIB)
    master.kill()
    with pytest.raises(StoreError, match="status"):
        store.exists("one")
    master.start()
    second = Producer(master.address)
    try:
        assert second.put("two", 100, 5) == 0
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                assert torch.equal(store.get("two", 100), content(100, 5))
                break
            except StoreError:
                time.sleep(0.1)
        else:
            raise AssertionError("the client does not find the new master")
    finally:
        second.kill()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.exists("two")


@needs_mooncake
@pytest.mark.slow
def test_mooncake_store_unreachable_master_raises_error() -> None:
    store = MooncakeStore(StoreSettings(f"127.0.0.1:{free_port()}"))
    with pytest.raises(StoreError, match="no mooncake_master answers"):
        store.exists("one")
    store.close()
    store = MooncakeStore(StoreSettings("nosuchmachine.invalid:50051"))
    with pytest.raises(UserError, match="not found"):
        store.exists("one")


def test_mooncake_store_invalid_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for master in ("localhost", "localhost:", ":50051", "http://localhost:50051", "localhost:0", "localhost:99999", ""):
        with pytest.raises(UserError, match="HOST:PORT"):
            StoreSettings(master).check()
    StoreSettings("[::1]:50051").check()
    with pytest.raises(UserError, match="device"):
        StoreSettings("a:1", device="mlx5_0").check()
    monkeypatch.setattr(mooncake_store, "DEVICES", mooncake_store.DEVICES / "none")
    with pytest.raises(UserError, match="protocol=tcp"):
        StoreSettings("a:1", protocol="rdma").check()


def test_mooncake_buffer_parts_are_aligned_and_suspects_return_later() -> None:
    now = [0.0]
    buffer = Buffer(256, lambda: now[0])
    with buffer.part(100) as first_N, buffer.part(100) as second_N:
        assert (first_N.storage_offset(), second_N.storage_offset()) == (0, 128)
        assert buffer._free(100) is None and buffer._free(28) is None  # 28 bytes behind the second are not aligned
        buffer.suspect(first_N)
    assert buffer._free(100) == 128 and buffer._free(200) is None
    now[0] = SUSPECT
    assert buffer._free(256) == 0
