"""Damaged and odd data files and folders: they load, or are refused in one line that names them; nothing else comes out."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, ipc

from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions
from tests.helpers import read_conversations

SECONDS = 60.0  # of processor time for one: a hundred times what the longest takes
TALK = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "é" * i}]} for i in range(1, 6)]
TEXTS = [{"prompt": f"q{i}", "response": "yes", "n": i} for i in range(1, 6)]
LONG = "9" * 5000
DEEP = "[" * 100_000
VALUES = (LONG, f"-{LONG}", "1e99999", "NaN", "-Infinity", DEEP, DEEP + "]" * 100_000, "[" * 990 + "]" * 990, '"\\ud800"')
VALUES += ("null", "true", "{}", '{"a":' * 500 + "1" + "}" * 500, '"\\u0000"', "\ufeff", "0x10", "")
TOKENS = (b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\n\n", b"\r", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u")


def jsonl(folder: Path) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TALK))
    return folder / "a.jsonl"


def array(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps(TALK))
    return folder / "a.json"


def comma(folder: Path) -> Path:
    csv.write_csv(pa.Table.from_pylist(TEXTS), folder / "a.csv")
    return folder / "a.csv"


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(TALK), folder / "a.parquet")
    return folder / "a.parquet"


def arrow(folder: Path) -> Path:
    table = pa.Table.from_pylist(TALK)
    with ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


def stream(folder: Path) -> Path:
    table = pa.Table.from_pylist(TEXTS)
    with ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


def mutated(content: bytes, chance: random.Random, text: bool) -> bytes:
    """One to three changes: bytes flipped, cut out, doubled, or replaced by what trips a reader."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(content) + 1)
        kind = chance.choice(("flip", "cut", "double", "token", "value", "value") if text else ("flip", "flip", "cut", "word"))
        end = min(len(content), at + chance.choice((1, 2, 8, 64)))
        if kind == "flip" and at < len(content):
            content = content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at] + content[end if chance.random() < 0.7 else len(content) :]
        elif kind == "double":
            content = content[:end] + content[at:]
        elif kind == "word":
            content = content[:at] + chance.choice((b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f")) + content[at + 8 :]
        elif kind == "token":
            content = content[:at] + chance.choice(TOKENS) + content[at:]
        elif kind == "value":
            places = [i for i, c in enumerate(content) if c in b":[,"] or [len(content)]
            at = chance.choice(places) + 1
            stop = next((i for i in range(at, len(content)) if content[i] in b",]}\n"), len(content))
            content = content[:at] + chance.choice(VALUES).encode() + content[stop:]
    return content


def outcome(path: Path, cache: Path) -> str:
    """How many records were read, or the line that refuses them. Raises whatever else comes out."""
    began = time.process_time()
    try:
        said = str(len(read_conversations(DataOptions(path=str(path), cache=str(cache)))))
    except UserError as error:
        said = str(error)
        assert "\n" not in said and len(said) < 1500, said
        assert str(path) in said, f"{said} does not name {path}"
    assert time.process_time() - began < SECONDS
    return said


@pytest.mark.parametrize("seeds", [30, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [jsonl, array, comma, parquet, arrow, stream])
def test_data_file_mutated_bytes_load_or_are_refused_in_one_line(
    make: Callable[[Path], Path], seeds: int, tmp_path: Path
) -> None:
    """seeds: mutations of each kind of file. `make test-faults KINDS=data` goes on."""
    file = make(tmp_path)
    content, chance, found = file.read_bytes(), random.Random(0), []
    assert outcome(file, tmp_path / "cache") == "5"
    for _ in range(seeds):
        file.write_bytes(mutated(content, chance, text=make in (jsonl, array, comma)))
        found.append(outcome(file, tmp_path / "cache"))
    refused = sum(not said.isdigit() for said in found)
    assert refused > seeds / 10, "the changes do harm"


CARDS: dict[str, str] = {
    "unclosed": "---\ndataset_info: [[[[\n---\n",
    "deep": f"---\nconfigs:\n- data_files: {'[' * 1000}{']' * 1000}\n---\n",
    "number": "---\nconfigs: 7\n---\n",
    "files": "---\nconfigs:\n- config_name: default\n  data_files: {train: [1]}\n---\n",
    "range": "---\nconfigs:\n- config_name: default\n  data_files: 'a{1..99999999999}.jsonl'\n---\n",
    "tag": "---\nconfigs: !!python/object:os.system [x]\n---\n",
    "bomb": "---\n" + "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9) if i else 'x'}]\n" for i in range(9)) + "---\n",
    "bytes": "---\n\x00\n---\n",
}
BESIDE: dict[str, tuple[str, bytes]] = {
    "script": ("{folder}.py", b"raise SystemExit('it ran')"),
    "archive": ("train.zip", b"no archive"),
    "infos": ("dataset_infos.json", b'{"a": 1}'),
    "state": ("state.json", b"["),
    "provenance": ("provenance.json", DEEP.encode()),
    "picture": ("train.png", b"x"),
    "audio": ("metadata.csv", b"file_name\n\x00"),
    "shards": ("train-00000-of-99999999999.jsonl", b"{}"),
}


BOTH = ("script", "shards")  # another branch if there is data next to them
FOLDERS = [
    pytest.param(name, whole, marks=[] if name in BOTH or whole == number % 2 else pytest.mark.grid)
    for number, name in enumerate([*CARDS, *BESIDE])
    for whole in (True, False)
]


@pytest.mark.parametrize(("name", "whole"), FOLDERS)
def test_data_folder_with_odd_file_loads_or_is_refused_in_one_line(
    name: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """whole: with data beside what is odd."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "odd"
    folder.mkdir()
    if whole:
        shutil.move(jsonl(tmp_path), folder / "train.jsonl")
    if name in CARDS:
        (folder / "README.md").write_text(CARDS[name])
    else:
        file, content = BESIDE[name]
        (folder / file.format(folder=folder.name)).write_bytes(content)
    said = outcome(folder, tmp_path / "cache")
    assert said == "5" or not said.isdigit() or name == "shards"
    if name == "script":
        assert "odd.py" in said and "not run" in said


def test_data_path_impossible_is_refused_in_one_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for path in ("~nobody-of-this-name/a.jsonl", f"{'a' * 5000}.jsonl", f"{'a/' * 3000}b.jsonl", "a\0.jsonl"):
        with subtests.test(path=path[:50]):
            with pytest.raises(UserError) as error:
                read_conversations(DataOptions(path=path, cache=str(tmp_path)))
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [LONG, DEEP + "]" * 100_000])
def test_data_record_with_oversized_value_is_refused_by_line(value: str, tmp_path: Path) -> None:
    """Its line is named, so that `data.bad_records` can leave it out."""
    (tmp_path / "a.jsonl").write_text(f'{json.dumps(TALK[0])}\n{{"messages": {value}}}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: expected"):
        read_conversations(DataOptions(path=str(tmp_path / "a.jsonl"), cache=str(tmp_path)))


def test_data_table_with_date_out_of_range_is_refused(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"prompt": ["q"], "response": ["a"], "day": pa.array([2**62], pa.timestamp("us"))}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    assert "a.parquet: expected" in outcome(tmp_path / "a.parquet", tmp_path)
