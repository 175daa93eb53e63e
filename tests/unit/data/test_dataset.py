"""Which conversations make up which step, padding, sharding and the summary."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset, check_supervised, collate, load_dataset, shard

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' end ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
WORDS = ["unk", "user", "assistant", "end", *map(str, range(40))]


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="unk"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="unk", chat_template=TEMPLATE)


def write(path: Path, count: int, reply_words: int = 2) -> str:
    lines = [json.dumps({"prompt": str(i), "response": " ".join([str(i)] * reply_words)}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def encoded(*lengths: int) -> list[Encoded]:
    return [Encoded(np.arange(10 * i, 10 * i + n, dtype=np.int32), np.arange(n) > 0) for i, n in enumerate(lengths, start=1)]


def data(count: int, seed: int = 0) -> Dataset:
    return Dataset(encoded(*[2] * count), [], {}, seed)


def firsts(rows: list[Encoded]) -> list[int]:
    return [int(row.token_ids[0]) for row in rows]


def test_load_dataset_splits_held_out_rows_and_reports_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 10)
    loaded = load_dataset(DataOptions(path=path, held_out=3), word_tokenizer())
    assert (len(loaded.train), len(loaded.held_out)) == (7, 3)
    said = [int(row.token_ids[1]) for row in [*loaded.train, *loaded.held_out]]
    assert sorted(said) == [WORDS.index(str(i)) for i in range(10)]
    # user i end assistant i i end: the header ends the prompt, three tokens are supervised
    assert loaded.train[0].mask.tolist() == [False] * 4 + [True] * 3
    sha256 = loaded.summary.pop("sha256")
    assert loaded.summary == {
        "records": 10,
        "prepared": 10,
        "conversations": 10,
        "dropped": 0,
        "rejected": 0,
        "truncated": 0,
        "documents": 10,
        "tokens": 70,
        "supervised_tokens": 30,
        "supervised_fraction": 30 / 70,
        "mean_length": 7.0,
        "lengths": [[32, 10], [64, 0], [128, 0], [256, 0], [512, 0], [1024, 0]],
        "held_out": 3,
        "sources": [
            {
                "path": path,
                "records": 10,
                "weight": None,
                "commit": None,
                "forms": {"prompt": 10},
                "conversations": 10,
                "supervised_tokens": 30,
            }
        ],
    }
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(Path(path).read_bytes())
    again = load_dataset(DataOptions(path=str(tmp_path / "b.jsonl.gz"), held_out=3), word_tokenizer())
    assert again.summary["sha256"] == sha256
    assert firsts(again.held_out) == firsts(loaded.held_out)
    other = load_dataset(DataOptions(path=path, held_out=3, limit=9), word_tokenizer())
    assert other.summary["sha256"] != sha256


def test_load_dataset_held_out_rows_depend_on_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 30)
    apart = [
        [int(e.token_ids[1]) for e in load_dataset(DataOptions(path=path, held_out=5, seed=s), word_tokenizer()).held_out]
        for s in (0, 0, 1)
    ]
    assert apart[0] == apart[1] != apart[2]


def test_load_dataset_holds_out_an_eighth_and_64_at_most(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for count, apart in ((1, 0), (2, 1), (15, 1), (94, 11), (511, 63), (700, 64)):
        with subtests.test(count=count):
            loaded = load_dataset(DataOptions(path=write(tmp_path / "a.jsonl", count)), word_tokenizer(), progress=False)
            assert (len(loaded.held_out), len(loaded.train)) == (apart, count - apart)
            assert loaded.summary["held_out"] == apart


def test_load_dataset_conversation_truncated_before_reply_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = {"prompt": "1 2 3 4 5 6", "response": "7"}
    records = [{"prompt": "1", "response": "2 3 4"}, long, {"prompt": "2", "response": "3"}]
    path.write_text("\n".join(json.dumps(record) for record in records))
    summary = load_dataset(DataOptions(path=str(path), held_out=0, max_length=6), word_tokenizer()).summary
    assert {k: summary[k] for k in ("conversations", "dropped", "truncated", "tokens")} == {
        "conversations": 2,
        "dropped": 1,
        "truncated": 1,
        "tokens": 12,
    }


def test_load_dataset_no_rows_left_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 4)
    for options, says in [
        (DataOptions(path=path, max_length=4), "none of 4 conversations has a supervised token.*raise data.max_length"),
        (DataOptions(path=path, held_out=4), "4 usable .* data.held_out=4 leave none to train on; set .* below 4"),
    ]:
        with pytest.raises(UserError, match=says):
            load_dataset(options, word_tokenizer())


def test_load_dataset_progress_bar_appears_for_many_conversations_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafttrain.data.dataset.BAR_FROM", 100)
    path = write(tmp_path / "a.jsonl", 100)
    load_dataset(DataOptions(path=path), word_tokenizer(), progress=False)
    load_dataset(DataOptions(path=path, limit=99), word_tokenizer())
    assert "tokenising" not in capsys.readouterr().err
    load_dataset(DataOptions(path=path), word_tokenizer())
    assert "tokenising" in capsys.readouterr().err


@settings(deadline=None)
@given(count=st.integers(1, 12), size=st.integers(1, 9), seed=st.integers(-3, 2**40))
def test_dataset_epoch_visits_each_conversation_once(count: int, size: int, seed: int) -> None:
    dataset = data(count, seed)
    stream = [row for step in range(2 * count) for row in firsts(dataset.global_batch(step, size))]
    for epoch in range(len(stream) // count):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == firsts(dataset.train)


def test_dataset_global_batch_depends_on_seed_and_step() -> None:
    assert firsts(data(50).global_batch(7, 4)) == firsts(data(50).global_batch(7, 4))
    assert firsts(data(50).global_batch(7, 4)) != firsts(data(50, seed=1).global_batch(7, 4))
    assert data(50).order(0, 4) != data(50).order(1, 4)


@settings(deadline=None)
@given(world=st.sampled_from([1, 2, 4]), micro=st.sampled_from([1, 2, 3]), steps=st.integers(1, 3))
def test_shard_ranks_partition_global_batch(world: int, micro: int, steps: int) -> None:
    batch = encoded(*[2] * (world * micro * steps))
    parts = [shard(batch, rank, world, micro) for rank in range(world)]
    assert all(len(part) == steps and all(len(rows) == micro for rows in part) for part in parts)
    assert sorted(first for part in parts for rows in part for first in firsts(rows)) == firsts(batch)
    assert firsts(parts[-1][0])[0] == firsts(batch)[world - 1]


def test_shard_uneven_global_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"global_batch=6 must be a multiple of train.micro_batch=2 x 2 processes; set it to 8"):
        shard(encoded(*[2] * 6), 0, 2, 2)


def test_collate_pads_shorter_rows_on_right() -> None:
    batch = collate(encoded(3, 1), pad_id=9)
    assert batch.token_BT.tolist() == [[10, 11, 12], [20, 9, 9]]
    assert batch.position_BT.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.document_BT.tolist() == [[0, 0, 0], [0, -1, -1]]
    assert batch.mask_BT.tolist() == [[False, True, True], [False, False, False]]
    assert batch.supervised() == 2
    assert batch.future(2).label_M.tolist() == [2]


def test_collate_length_rounded_up_keeps_supervision_and_anchors(subtests: pytest.Subtests) -> None:
    for most, length in ((None, 64), (50, 50), (30, 40)):
        with subtests.test(most=most):
            exact, rounded = (collate(encoded(40, 31), 9, multiple, most) for multiple in (1, 64))
            assert (rounded.length, rounded.longest, exact.length) == (length, 40, 40)
            assert rounded.supervised() == exact.supervised()
            ours, theirs = rounded.anchors(5), exact.anchors(5)
            assert torch.equal(ours.source_BA, theirs.source_BA) and torch.equal(ours.token_BA, theirs.token_BA)


def test_check_supervised_batch_without_supervised_tokens_is_refused() -> None:
    check_supervised(1, 3)
    with pytest.raises(UserError, match=r"step 3: .*loss mask selects nothing.*raise data.max_length"):
        check_supervised(0, 3)


@pytest.mark.parametrize("workers", [None, 1])
def test_load_dataset_rows_have_adapter_of_record_or_of_source(workers: int | None, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    names = [None, "sql", "chat", None]
    lines = [json.dumps({"prompt": str(i), "response": str(i), "adapter": name}) for i, name in enumerate(names)]
    path.write_text("\n".join(lines) + "\n")
    for default in (None, "sql"):
        options = DataOptions(path=str(path), held_out=0, adapter=default, workers=workers, cache=str(tmp_path / "cache"))
        data = load_dataset(options, word_tokenizer(), progress=False, adapters=["chat", "sql"])
        by_prompt = {int(row.token_ids[1]): row.adapter for row in data.train}
        assert [by_prompt[key] for key in sorted(by_prompt)] == [name or default for name in names]
        assert collate(list(data.train), 0).adapters == tuple(row.adapter for row in data.train)
        data.close()


def test_load_dataset_unknown_adapter_is_unusable_record(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(json.dumps({"prompt": "1", "response": "1", "adapter": "sql"}) + "\n")
    options = DataOptions(path=str(path), held_out=0)
    for known, listed in (([], "none is set"), (["chat"], "chat")):
        with pytest.raises(UserError, match=rf"mixed.jsonl:1: the adapter 'sql' is none of target.adapters \({listed}\); set"):
            load_dataset(options, word_tokenizer(), progress=False, adapters=known)
    path.write_text(json.dumps({"prompt": "1", "response": "1", "adapter": 3}) + "\n")
    with pytest.raises(UserError, match=r"expected the name of one of target\.adapters in `adapter`, got 3; correct it"):
        load_dataset(options, word_tokenizer(), progress=False)
