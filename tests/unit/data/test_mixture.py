"""Several sources of different forms: what is recognised, shares by weight, and the one line for what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet

from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions, SourceOptions
from drafttrain.data.dataset import Dataset, load_dataset
from drafttrain.data.order import Mixture
from tests.helpers import read_conversations
from tests.unit.data.test_dataset import WORDS, word_tokenizer


def spoken(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(number)}, {"role": "assistant", "content": str(number)}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """JSON lines of ShareGPT's form, a CSV of Alpaca's, a Parquet file of messages, and a folder laid out as on the hub."""
    told = [{"conversations": [{"from": "human", "value": str(i)}, {"from": "gpt", "value": str(i)}]} for i in range(10)]
    (tmp_path / "told.jsonl").write_text("".join(json.dumps(record) + "\n" for record in told))
    numbers = [str(i) for i in range(10, 16)]
    csv.write_csv(pa.table({"instruction": numbers, "input": [""] * 6, "output": numbers}), tmp_path / "asked.csv")
    parquet.write_table(pa.table({"messages": [spoken(i) for i in range(16, 20)]}), tmp_path / "said.parquet")
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for shard, rows in enumerate((range(20, 25), range(25, 30))):
        name = f"train-{shard:05d}-of-00002.parquet"
        parquet.write_table(
            pa.table({"prompt": list(map(str, rows)), "response": list(map(str, rows))}), tmp_path / "hub/data" / name
        )
    parquet.write_table(pa.table({"text": ["39 39"]}), tmp_path / "hub/data/test-00000-of-00001.parquet")
    (tmp_path / "hub" / "README.md").write_text("# A data set\n")
    return tmp_path


def mix(folder: Path, *weights: float | None) -> list[SourceOptions]:
    names = ("told.jsonl", "asked.csv", "said.parquet", "hub")
    return [SourceOptions(str(folder / name), weight=weight) for name, weight in zip(names, weights or [None] * 4, strict=True)]


def load(sources: list[SourceOptions], **options: Any) -> Dataset:
    return load_dataset(DataOptions(mix=sources, **{"held_out": 0, **options}), word_tokenizer())


def said(data: Dataset, steps: int, size: int) -> list[int]:
    """The numbers that the batches' conversations are of."""
    return [int(row.token_ids[1]) - WORDS.index("0") for step in range(steps) for row in data.global_batch(step, size)]


def test_mixture_detects_forms_and_visits_conversations_once_per_epoch(folder: Path) -> None:
    data = load(mix(folder))
    assert [source["forms"] for source in data.summary["sources"]] == [
        {"conversations": 10},
        {"alpaca": 6},
        {"messages": 4},
        {"prompt": 10},
    ]
    for epoch in (0, 1):
        assert sorted(said(data, 12, 5)[30 * epoch : 30 * (epoch + 1)]) == list(range(30))


def test_mixture_weights_are_shares_of_each_epoch(folder: Path) -> None:
    data = load(mix(folder, 3, 1, 1, 1))
    rows = said(data, 12, 5)
    for epoch in (rows[:30], rows[30:]):
        counts = Counter(0 if n < 10 else 1 if n < 16 else 2 if n < 20 else 3 for n in epoch)
        assert counts == {0: 15, 1: 5, 2: 5, 3: 5}
    assert set(Counter(n for n in rows if n < 10).values()) == {3}  # 15 places an epoch: three passes in two epochs
    assert sorted(n for n in rows if n >= 20) == list(range(20, 30))  # 5 places an epoch: one pass in two
    assert rows == said(load(mix(folder, 3, 1, 1, 1)), 12, 5)
    assert rows != said(load(mix(folder, 3, 1, 1, 1), seed=1), 12, 5)


def test_mixture_global_batch_at_late_step_needs_no_earlier_steps(folder: Path) -> None:
    whole, late = (load(mix(folder, 3, 1, 1, 1)) for _ in range(2))
    rows = [row.token_ids.tolist() for step in range(40) for row in whole.global_batch(step, 5)]
    assert [row.token_ids.tolist() for row in late.global_batch(39, 5)] == rows[-5:]


def test_mixture_held_out_rows_follow_weights_and_are_not_trained(folder: Path) -> None:
    data = load(mix(folder, 3, 1, 1, 1), held_out=6)
    apart = [int(row.token_ids[1]) - WORDS.index("0") for row in data.held_out]
    assert Counter(min(n // 10, 2) if n >= 20 or n < 10 else 1 for n in apart)[0] == 3
    assert not set(apart) & set(said(data, 40, 5))
    with pytest.raises(UserError, match=r"data.held_out=24 takes all of .*told.jsonl; lower it"):
        load(mix(folder, 3, 1, 1, 1), held_out=24)


def test_mixture_packed_rows_keep_source_weights(folder: Path) -> None:
    data = load(mix(folder, 3, 1, 1, 1), pack=True, max_length=24)
    numbers = Counter(int(ids[1]) - WORDS.index("0") for row in data.train for ids in row.documents)
    assert numbers.total() == 30 and sum(count for n, count in numbers.items() if n < 10) == 15


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.data())
def test_mixture_shares_sum_to_epoch_and_rows_repeat_evenly(sizes: list[int], data: st.DataObject) -> None:
    weights = tuple(data.draw(st.floats(0.1, 10)) for _ in sizes)
    mixture, total = Mixture(tuple(sizes), weights, seed=3), sum(sizes)
    shares = mixture.shares(total)
    assert sum(shares) == total
    assert all(abs(share - total * w / sum(weights)) < 1 for share, w in zip(shares, weights, strict=True))
    drawn = np.concatenate([mixture.epoch(e) for e in range(7)])
    first = 0
    for size, share in zip(sizes, shares, strict=True):
        counts = np.bincount(drawn[(drawn >= first) & (drawn < first + size)] - first, minlength=size)
        assert counts.sum() == 7 * share and counts.max() - counts.min() <= 1
        first += size


def test_data_folder_is_read_by_hub_layout_rules(folder: Path, tmp_path: Path) -> None:
    def numbers(**options: Any) -> list[str]:
        found = read_conversations(DataOptions(**options))
        return [c.text or c.messages[0]["content"] for c in found]

    assert numbers(path=str(folder / "hub")) == [str(i) for i in range(20, 30)]
    assert numbers(path=str(folder / "hub"), limit=7) == [str(i) for i in range(20, 27)]
    assert numbers(path=str(folder / "hub"), split="test") == ["39 39"]
    assert numbers(path=str(folder / "hub/data/train-*.parquet")) == [str(i) for i in range(20, 30)]
    with pytest.raises(UserError, match=r"hub: it has no split 'validation' but train, test; set data.split"):
        numbers(path=str(folder / "hub"), split="validation")
    configs = {"one": "data/test*", "two": "data/train-00001*"}
    card = "".join(f"- config_name: {name}\n  data_files: {pattern}\n" for name, pattern in configs.items())
    (folder / "hub" / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    assert numbers(path=str(folder / "hub"), config="two") == [str(i) for i in range(25, 30)]
    with pytest.raises(UserError, match=r"'three' not found. Available: .*'one', 'two'.*; correct data.path, data.config"):
        numbers(path=str(folder / "hub"), config="three")
    shards = tmp_path / "shards"
    shards.mkdir()
    for i in range(3):
        (shards / f"part-{i}.jsonl").write_text(json.dumps({"text": str(i)}) + "\n")
    (shards / "provenance.json").write_text('{"target": "x"}')
    assert numbers(path=str(shards)) == ["0", "1", "2"]


def test_mixture_with_weights_of_some_sources_is_refused() -> None:
    with pytest.raises(UserError, match="some sources have a weight and others have none"):
        load([SourceOptions("a.jsonl", weight=1.0), SourceOptions("b.jsonl")])


def test_mixture_with_data_path_or_limit_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.path=a.jsonl and data.mix both name the data"):
        load([SourceOptions("b.jsonl")], path="a.jsonl")
    with pytest.raises(UserError, match=r"data.limit is for data.path alone; give each source of data.mix its own limit"):
        load([SourceOptions("b.jsonl")], limit=3)


def test_load_dataset_bad_records_are_skipped_up_to_limit_and_named(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": str(i), "response": str(i)}) for i in range(9)]
    lines[3], lines[6] = '{"text": 5}', json.dumps({"prompt": "1", "response": None})
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    sources = [SourceOptions(str(tmp_path / "a.jsonl"))]
    data = load(sources, bad_records=2)
    assert (data.summary["conversations"], data.summary["rejected"]) == (7, 2)
    assert data.conversations is not None
    assert [fault.partition(": ")[0].rpartition(":")[2] for fault in data.conversations.faults] == ["4", "7"]
    assert sorted(said(data, 7, 1)) == [0, 1, 2, 4, 5, 7, 8]
    with pytest.raises(UserError, match=r"a.jsonl:7: .*\(bad record 2, 1 may be left out: data.bad_records\)"):
        load(sources, bad_records=1)
    with pytest.raises(UserError, match=r"a.jsonl:4: expected a string in text, got int"):
        load(sources)


def test_load_dataset_reply_without_supervised_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1 2"}\n{"text": "1"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:2: expected supervised tokens, got a reply of none; fill it, or remove it"):
        load([SourceOptions(str(tmp_path / "a.jsonl"))])
