"""Every record form and file kind, and one line with the place for everything unusable."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset
from pyarrow import csv, ipc, parquet

from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions, hub_data
from drafttrain.data import files as data_files
from drafttrain.data.hub_data import SplitFiles
from drafttrain.data.sources import Conversation, check_sources
from tests.helpers import read_conversations

MESSAGES = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
EXPECTED = tuple(MESSAGES["messages"])


def write(path: Path, *records: Any) -> str:
    content = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def read(path: str, **options: Any) -> list[Conversation]:
    return read_conversations(DataOptions(path=path, **options))


CHATS: list[dict[str, Any]] = [
    MESSAGES,
    {"id": 1, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    {"prompt": "hi", "response": "yes"},
    {"messages": None, "text": None, "prompt": "hi", "response": "yes"},
]


def test_source_every_chat_form_gives_same_messages(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *CHATS)
    assert read(path) == [Conversation(f"{path}:{line}", EXPECTED) for line in range(1, len(CHATS) + 1)]


def test_source_text_record_is_read_as_plain_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "def f(): ..."})
    assert read(path) == [Conversation(f"{path}:1", text="def f(): ...")]


def test_source_json_lines_ignore_final_blank_lines_and_byte_order_mark(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "lines.json", "lines.json.gz"):
        path = write(tmp_path / name, "\ufeff" + json.dumps(MESSAGES), MESSAGES, "", "  ")
        with subtests.test(name=name):
            assert [c.origin for c in read(path)] == [f"{path}:1", f"{path}:2"]


def test_source_json_array_records_are_numbered(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps([MESSAGES, MESSAGES], indent=1))
    assert [c.origin for c in read(path)] == [f"{path}:record 1", f"{path}:record 2"]


def test_source_parquet_arrow_and_csv_tables_are_read(tmp_path: Path) -> None:
    chats = pa.Table.from_pylist([MESSAGES] * 3)
    parquet.write_table(chats, tmp_path / "a.parquet")
    for name, writer in {"file.arrow": ipc.new_file, "stream.arrow": ipc.new_stream}.items():
        with writer(str(tmp_path / name), chats.schema) as sink:
            sink.write_table(chats)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert [(c.origin, c.messages) for c in read(str(tmp_path / name))] == [
            (f"{tmp_path / name}:row {i}", EXPECTED) for i in (1, 2, 3)
        ]
    csv.write_csv(pa.table({"prompt": ["1", "a\nb"], "response": ["2", "c"]}), tmp_path / "a.csv")
    assert [[m["content"] for m in c.messages] for c in read(str(tmp_path / "a.csv"))] == [["1", "2"], ["a\nb", "c"]]


def test_source_limit_stops_before_broken_line(tmp_path: Path) -> None:
    assert len(read(write(tmp_path / "a.jsonl", MESSAGES, MESSAGES, "broken"), limit=2)) == 2


def test_source_embedded_reads_asset_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "train.jsonl.gz", MESSAGES)
    monkeypatch.setattr("drafttrain.data.sources.ASSETS", tmp_path)
    assert [c.messages for c in read("embedded")] == [EXPECTED]
    assert data_files.ASSETS.name == "assets"


def test_source_hub_data_set_is_loaded_once_and_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files that only `datasets` can read. `tests/integration/test_hub.py` has the others."""
    asked = []

    def load_dataset(path: str, split: str, streaming: bool = False, **more: Any) -> Any:
        asked.append((path, more["name"], split, more["revision"], streaming))
        return iter([MESSAGES, MESSAGES]) if streaming else Dataset.from_list([MESSAGES, MESSAGES])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr(hub_data, "_ask", lambda source: SplitFiles(source.path, "c" * 40, ()))
    cache = str(tmp_path)
    for _ in range(2):  # the second read finds the first one's records
        assert [c.origin for c in read("owner/set", split="test_sft", limit=1, cache=cache)] == ["owner/set:row 1"]
    assert len(read("owner/set", cache=cache)) == 2
    assert len(read("owner/set", config="en", revision="v2", cache=cache)) == 2
    assert asked == [
        ("owner/set", None, "test_sft", None, True),
        ("owner/set", None, "train", None, False),
        ("owner/set", "en", "train", "v2", False),
    ]
    for key in ("revision", "files"):
        with pytest.raises(UserError, match=f"data.{key} is for a data set of the hub, data.path=embedded is none"):
            read("embedded", **{key: "x"})


def test_source_hub_failure_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("Dataset 'owner/set' doesn't exist on the Hub\nor cannot be accessed")

    monkeypatch.setattr(hub_data, "_ask", ask)
    monkeypatch.setattr(hub_data, "data_set_reason", lambda *_: None)  # asks the hub
    says = r"data.path=owner/set: no local file.*doesn't exist on the Hub\); correct data.path"
    with pytest.raises(UserError, match=says) as caught:
        read("owner/set", cache=str(tmp_path))
    assert "\n" not in str(caught.value)


BAD: list[tuple[Any, str]] = [
    ("", "expected a JSON object, got an empty line; remove it"),
    ('{"text": ', "expected JSON, got the end of the text"),
    ('{"text": 12 13}', "expected JSON, got '13}'.*column 13"),
    ("[" * 100_000, "nested too deeply"),
    ("[1]", "expected a JSON object, got list"),
    ({"txt": "a"}, "expected `messages`.* got txt; rename"),
    ({}, "got no key at all"),
    ({"text": 5}, "expected a string in text, got int"),
    ('{"text": "a", "number": ' + "1" * 5000 + "}", "a number with thousands of digits"),
    ({"text": "\ud800"}, "unpaired surrogate at character 0"),
    ({"prompt": "a", "response": ["b"]}, "expected a string in response, got list"),
    ({"messages": "a"}, "expected a list in `messages`, got str"),
    ({"messages": ["a"]}, r"expected an object in messages\[0\], got str"),
    ({"messages": [{"role": "assistant"}]}, r"expected a string in messages\[0\].content, got nothing"),
    ({"messages": [{"role": "user", "content": "a"}]}, "expected an assistant turn to learn from, got user"),
    ({"messages": []}, "expected an assistant turn to learn from, got no turn"),
    ({"conversations": [{"from": "alien", "value": "a"}]}, "expected a speaker among human.*got 'alien'"),
]


def test_source_bad_line_is_named_in_one_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for line, says in BAD:
        path = write(tmp_path / "a.jsonl", MESSAGES, line, MESSAGES)
        with subtests.test(line=line if isinstance(line, dict) else line[:50]):
            with pytest.raises(UserError, match=rf"^{path}:2: .*{says}") as caught:
                read(path)
            assert "\n" not in str(caught.value)
            assert ";" in str(caught.value)  # the way out follows


def test_source_malformed_json_array_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.json:3: expected JSON"):
        read(write(tmp_path / "a.json", "[", '{"text": "a"},', '{"text" "b"}', "]"))


def test_source_invalid_utf8_names_line_and_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(UserError, match=r"latin.jsonl:2: expected UTF-8, got byte 0xe9"):
        read(str(tmp_path / "latin.jsonl"))


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.json.gz"])
def test_source_damaged_gzip_is_refused(tmp_path: Path, name: str) -> None:
    content = [MESSAGES] * 500 if "jsonl" in name else [json.dumps([MESSAGES] * 500)]
    path = Path(write(tmp_path / name, *content))
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UserError, match=rf"{name}.*expected gzip data, got a damaged file"):
        read(str(path))
    path.write_bytes(b"not gzip")
    with pytest.raises(UserError, match=rf"{name}.*damaged file"):
        read(str(path))


def test_source_empty_table_file_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name in ("a.parquet", "a.arrow", "a.csv"):
        (tmp_path / name).write_bytes(b"")
        says = rf"{name}: expected a .* table, got a file that cannot be read"
        with subtests.test(name=name), pytest.raises(UserError, match=says):
            read(str(tmp_path / name))


def test_parquet_with_changed_bits_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Without compression, where a changed bit may go unnoticed. `test_fuzz.py` has the other tables."""
    table, path, draw = pa.table({"text": [f"text {i}" for i in range(40)]}), tmp_path / "a.parquet", random.Random(0)
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    whole, refused = path.read_bytes(), 0
    for _ in range(120):
        i = draw.randrange(len(whole))
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << draw.randrange(8)]) + whole[i + 1 :])
        try:
            read(str(path))
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 6


def test_source_empty_json_file_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for content in ("", "\n\n", "[]"):
        (tmp_path / "a.json").write_text(content)
        says = r"a.json: expected at least one record, got an empty file"
        with subtests.test(content=content), pytest.raises(UserError, match=says):
            read(str(tmp_path / "a.json"))


def test_source_missing_or_unknown_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", MESSAGES)
    (tmp_path / "notes.docx").write_text("x")
    for path, says in {
        tmp_path / "trian.jsonl": r"got nothing there; did you mean train.jsonl\?",
        tmp_path / "zzz.parquet": "got nothing there; correct the path",
        tmp_path / "none" / "a.jsonl": "does not exist either",
        tmp_path / "notes.docx": "expected .jsonl.* got '.docx'",
    }.items():
        with pytest.raises(UserError, match=says):
            read(str(path))
    (tmp_path / "sub").mkdir()
    with pytest.raises(UserError, match=r"data.path=.*sub.* doesn't contain any data files; correct data.path"):
        read(str(tmp_path / "sub"))
    with pytest.raises(UserError, match=r"expected .jsonl.* files, got none; correct the pattern"):
        read(str(tmp_path / "*.parquet"))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux has a file that opens and cannot be read")
def test_source_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"a.jsonl: cannot be read \(Input/output error\)"):
        read(str(tmp_path / "a.jsonl"))


def test_data_supervise_of_no_names_is_refused() -> None:
    with pytest.raises(UserError, match=r"^data.supervise is empty; name what is learnt: reply, call, reasoning$"):
        check_sources(DataOptions(supervise=[]))
