"""Large data: prepared by processes, kept on disk, and trained on before all of it is there, with the same batches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from drafttrain.core.errors import UserError, WorkerError
from drafttrain.data import DataOptions, SourceOptions
from drafttrain.data import dataset as datasets_module
from drafttrain.data.chat import Encoder
from drafttrain.data.dataset import Dataset, load_dataset
from drafttrain.data.pool import CHUNK, Conversations, Workers
from drafttrain.data.records import open_records
from drafttrain.data.sources import open_sources
from drafttrain.data.store import BlockStore
from drafttrain.data.workers import Follower, WorkerPool
from tests.unit.data.test_dataset import word_tokenizer

COUNT = 600
HANG = 120.0  # seconds: what takes longer never ends


def wait_until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG
    while not done():
        assert time.monotonic() < deadline, f"not within {HANG:g} s"
        time.sleep(0.02)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Conversations of many lengths; every seventh has no reply within 20 tokens."""
    generator = np.random.default_rng(0)
    with (tmp_path / "a.jsonl").open("w") as file:
        for i in range(COUNT):
            asked = " ".join(["7"] * (30 if i % 7 == 0 else 1))
            reply = " ".join(map(str, generator.integers(0, 40, int(generator.integers(1, 12)))))
            file.write(json.dumps({"prompt": asked, "response": reply}) + "\n")
    return tmp_path / "a.jsonl"


def load(path: Path, **options: Any) -> Dataset:
    return load_dataset(DataOptions(path=str(path), max_length=20, **options), word_tokenizer(), progress=False)


def batches(data: Dataset, steps: int = 30) -> list[list[int]]:
    """Beyond the first epoch."""
    return [row.token_ids.tolist() + row.mask.tolist() for step in range(steps) for row in data.global_batch(step, 32)]


def test_load_dataset_streamed_by_workers_gives_same_batches(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(path)
    monkeypatch.setattr(datasets_module, "FIRST", 64)
    cache = str(tmp_path / "cache")
    streamed = load(path, cache=cache, workers=1)  # one worker ends its tasks in order: the first rows come first
    assert streamed.preparing and streamed.summary["prepared"] < COUNT
    again = load(path, cache=cache, workers=2, limit=COUNT)
    try:
        assert batches(streamed) == batches(whole)
        assert not streamed.preparing
        assert streamed.report() == whole.summary
        assert [row.token_ids.tolist() for row in streamed.held_out] == [row.token_ids.tolist() for row in whole.held_out]
        assert batches(again, 3) == batches(whole, 3)
    finally:
        streamed.close()
        again.close()


def test_load_dataset_cached_blocks_are_not_prepared_again(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = {"workers": 1, "cache": str(tmp_path / "cache")}
    first = load(path, **cache, pack=True)
    assert not first.preparing

    def never(*_: Any) -> Any:
        raise AssertionError("everything is there")

    monkeypatch.setattr("drafttrain.data.pool.WorkerPool", never)
    assert batches(load(path, **cache, pack=True)) == batches(first)
    assert batches(load(path, **cache, seed=3)) == batches(load(path, seed=3))
    with pytest.raises(AssertionError, match="everything is there"):
        load(path, **cache, date="2020-02-02")
    (damaged,) = list((tmp_path / "cache").rglob("*.arrow"))[:1]
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(AssertionError, match="everything is there"):
        load(path, **cache)
    assert not damaged.exists()


def test_conversations_follower_reads_blocks_of_first_process(path: Path, tmp_path: Path) -> None:
    options = DataOptions(path=str(path), max_length=20, workers=1, cache=str(tmp_path / "cache"))
    sources, encoder = open_sources(options), Encoder(word_tokenizer(), 20)
    led, leads = (Conversations(sources, encoder, Workers(tmp_path / "cache", 1, first)) for first in (False, True))
    everything = np.arange(COUNT)
    try:
        leads.request(everything)
        led.wait(everything)
        assert isinstance(led._preparer, Follower)
        leads.wait(everything)
        assert all(led.encoded(i).token_ids.tolist() == leads.encoded(i).token_ids.tolist() for i in range(0, COUNT, 50))
    finally:
        leads.close()


def test_load_dataset_bad_record_in_worker_names_its_line(path: Path, tmp_path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[500] = '{"prompts": 5}'
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"a.jsonl:501: expected `messages`"):
        load(path, workers=1, cache=str(tmp_path / "cache"), pack=True)


@pytest.mark.slow
def test_load_dataset_killed_run_leaves_no_worker_and_no_torn_block(path: Path, tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from drafttrain.data import dataset
from tests.unit.data.test_preparation import load
if __name__ == "__main__":
    dataset.FIRST = 1
    load(Path({str(path)!r}), workers=1, cache={str(tmp_path / "cache")!r}, held_out=1)
    print("begun", flush=True)
    time.sleep({10 * HANG})
"""
    (tmp_path / "run.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "run.py")], stdout=subprocess.PIPE, text=True, env=environment
    ) as run:
        try:
            assert run.stdout is not None and run.stdout.readline() == "begun\n"
            children = psutil.Process(run.pid).children(recursive=True)
        finally:
            run.send_signal(signal.SIGKILL)
    wait_until(lambda: all(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in children))
    for folder in (p for p in (tmp_path / "cache").iterdir() if p.name != "spool"):
        assert all(BlockStore(folder).read(name) is not None for name in BlockStore(folder).names())
    assert batches(load(path, workers=1, cache=str(tmp_path / "cache"), held_out=1), 4) == batches(load(path, held_out=1), 4)


def test_open_records_unseekable_file_is_rewritten_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lines or as Arrow, and with the places of the original in messages."""
    import gzip

    import pyarrow as pa
    from pyarrow import csv, parquet

    monkeypatch.setattr("drafttrain.data.records.SMALL", 10)
    rows = [{"prompt": str(i), "response": "b"} for i in range(50)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    csv.write_csv(pa.Table.from_pylist(rows), tmp_path / "a.csv")
    labels = {"a.jsonl.gz": ":33", "a.json": ":record 33", "a.parquet": ":row 33", "a.csv": ":row 33"}
    for name, label in labels.items():
        records = open_records(tmp_path / name, None, tmp_path / "spool")
        assert (len(records), records[32]) == (50, (f"{tmp_path / name}{label}", rows[32]))
    written = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "spool").iterdir()}
    assert len(written) == 8  # and the checksum of each
    for name in labels:
        assert len(open_records(tmp_path / name, 7, tmp_path / "spool")) == 7
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "spool").iterdir()} == written


def test_conversations_tasks_hold_one_source_in_order(path: Path) -> None:
    conversations = Conversations(
        open_sources(DataOptions(mix=[SourceOptions(str(path)), SourceOptions(str(path), limit=5)])),
        Encoder(word_tokenizer(), 20),
        Workers(),
    )
    order = np.random.default_rng(0).permutation(conversations.count)
    tasks = list(conversations._tasks(order))
    assert max(len(task.numbers) for task in tasks) <= CHUNK
    found = [n for task in tasks for n in (conversations.first[task.source] + np.array(task.numbers)).tolist()]
    assert sorted(found) == list(range(COUNT + 5))
    assert [n for n in found if n < COUNT] == [n for n in order.tolist() if n < COUNT]


def test_worker_pool_killed_worker_raises_worker_error(path: Path, tmp_path: Path) -> None:
    options = DataOptions(path=str(path), max_length=20)
    conversations = Conversations(open_sources(options), Encoder(word_tokenizer(), 20), Workers(tmp_path / "cache", 1))
    conversations.wait(np.arange(1))
    pool = conversations._preparer
    assert isinstance(pool, WorkerPool)
    wait_until(lambda: pool._waiting is None)
    for process in pool._pool._processes.values():
        process.kill()
    wait_until(lambda: pool._pool._broken)
    with pytest.raises(WorkerError, match=r"a process that prepares data was killed.*; lower data.workers"):
        conversations.wait(np.arange(COUNT))
