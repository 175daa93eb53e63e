"""Prepared data that is not what was written any more: no record is lost or changed without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drafttrain.cli import main as cli
from drafttrain.core.errors import UserError
from drafttrain.core.files import LISTED
from drafttrain.data import DataOptions
from drafttrain.data import journal as journal_module
from drafttrain.data.journal import SETTINGS, Journal, check_settings, read, scan
from drafttrain.data.pool import Conversations, Workers
from drafttrain.data.provenance import FILE, find_provenance
from drafttrain.data.records import open_records, read_records
from drafttrain.data.sources import Faults, open_sources
from drafttrain.data.store import BlockStore, RecordBlock, encode_block, key_of
from drafttrain.targets.load import LoadedTarget
from tests.composing import compose_quickly
from tests.damage import harmed, refused
from tests.helpers import read_conversations
from tests.unit.data.conftest import load_once
from tests.unit.data.test_preparation import Encoder, word_tokenizer

SHORT = ["prepare.max_new_tokens=12", "prepare.drop=[]", "prepare.shard=3"]


MANY = pytest.mark.grid  # repeats with more places what a few of them prove: all bytes under a sha256 are alike


@pytest.fixture(scope="module")
def prepared(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `prepare` writes in two formats, in folders of their names."""
    folder = tmp_path_factory.mktemp("prepared")
    lines = [json.dumps({"turns": [f"Complete this code.\n\ndef f{i}("]}) + "\n" for i in range(5)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["drafttrain"])
        compose_quickly(patch)
        load_once(patch, loaded)
        for name in ("jsonl", "parquet"):
            words = [f"data.path={folder / 'prompts.jsonl'}", f"out={folder / name}", f"prepare.format={name}"]
            assert cli.run(["prepare", *words, *SHORT]) == 0
    return folder


@pytest.fixture
def out(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared / "jsonl", tmp_path / "out")
    return tmp_path / "out"


def trained_on(path: Path) -> list[Any]:
    """What training reads of it."""
    found = read_conversations(DataOptions(path=str(path)))
    return [find_provenance(str(path)), [(c.origin, c.messages) for c in found]]


@pytest.mark.parametrize("most", [12, pytest.param(100, marks=MANY)])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prepared_data_damaged_file_is_refused(kind: str, most: int, prepared: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(prepared / kind, tmp_path / "out"))
    parts = sorted(out.glob("part-*"))
    assert len(parts) == 2
    shares = refused([*parts, out / FILE], lambda: trained_on(out), most)
    assert set(shares.values()) == {1.0}
    # of the list all but spaces and line feeds count: more kinds of bytes than elsewhere
    assert refused([out / LISTED], lambda: trained_on(out), max(most, 60), removed=False)[LISTED] > 0.9
    for part in parts:
        assert refused([part], lambda part=part: trained_on(part), most, removed=False) == {part.name: 1.0}
        assert refused([part], lambda part=part: list(read_records(part, None, out)), most, removed=False) == {part.name: 1.0}


def test_prepared_data_missing_or_extra_part_is_refused(out: Path) -> None:
    first, second = sorted(out.glob("part-*"))
    whole = trained_on(out)
    second.rename(out / f"part-00007{second.suffix}")
    with pytest.raises(UserError, match=rf"{second.name}, which {LISTED} lists, is not there; prepare the data again"):
        trained_on(out)
    (out / f"part-00007{second.suffix}").rename(second)
    shutil.copy(first, out / f"part-00007{second.suffix}")
    with pytest.raises(UserError, match=rf"part-00007{second.suffix} is not in {LISTED}"):
        trained_on(out)
    (out / f"part-00007{second.suffix}").unlink()
    assert trained_on(out) == whole
    (out / LISTED).unlink()  # as earlier versions wrote it
    assert trained_on(out) == whole


def test_prepared_data_edited_part_is_read_after_checksum_list_is_deleted(out: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out" / "mine.jsonl"  # a file that prepare did not write
    mine.write_text('{"prompt": "a", "response": "b"}\n')
    assert len(read_conversations(DataOptions(path=str(mine)))) == 1
    part = out / "part-00000.jsonl"
    part.write_text("".join(part.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(UserError, match=f"part-00000.jsonl is damaged .* If you changed it on purpose, delete {LISTED} there"):
        trained_on(out)
    (out / LISTED).unlink()
    assert len(trained_on(out)[1]) == 4


def journal_of(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    with Journal(folder, 0) as journal:
        for i in range(5):
            journal.append(
                {"id": str(i), "messages": [{"role": "user", "content": f"é\u2028漢 {i}"}], "tokens": [3, i], "t": 0.8}
            )
    return folder / "rank-00000.jsonl", [record for _, _, record in read(folder)]


@pytest.mark.parametrize("most", [100, pytest.param(400, marks=MANY)])
def test_journal_damaged_byte_loses_only_its_line(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module.os, "fsync", lambda file: None)  # a slow disk takes long
    folder = tmp_path / "x"
    path, records = journal_of(folder)
    lost = 0
    for how in harmed(path, most):
        found, seen = [record for _, _, record in read(folder)], scan(folder)
        left = [record for record in found if record in records]  # a changed name of the checksum changes no field
        assert all({key: value for key, value in record.items() if key in records[0]} in records for record in found), how
        assert {record["id"] for record in found} == seen.answered
        if how.startswith("byte"):
            assert len(found) >= 3, how  # a line feed is of two
            lost += len(left) < 5
            before_others = not any(record["id"] == "4" for record in found)
            assert len(found) == 5 or seen.damaged or before_others, how
            if seen.damaged:
                assert seen.damaged[0].startswith(f"{path}:")
        if path.exists():
            with Journal(folder, 0) as journal:  # what a run that goes on does
                for record in records:
                    if record["id"] not in seen.answered:
                        journal.append(record)
            assert scan(folder).answered == {str(i) for i in range(5)}, how
    assert lost > 0.8 * most


def test_journal_lines_without_checksum_are_read(tmp_path: Path) -> None:
    path, records = journal_of(tmp_path)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [record for _, _, record in read(tmp_path)] == records and scan(tmp_path).damaged == []


def test_journal_settings_damaged_file_is_refused(tmp_path: Path) -> None:
    settings = {"target": {"name": "hf", "path": "a/b"}, "sampling": {"seed": 0, "top_p": 0.9}}
    check_settings(tmp_path, settings, write=True)

    def reads() -> None:
        check_settings(tmp_path, settings, write=False)

    assert refused([tmp_path / SETTINGS], reads, 100, removed=False)[SETTINGS] > 0.8
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    reads()


def plain(block: RecordBlock) -> dict[str, Any]:
    return {name: block.column(name) for name in block.batch.schema.names}


@pytest.mark.parametrize("most", [100, pytest.param(1500, marks=MANY)])
def test_store_damaged_block_is_prepared_again(most: int, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{i} 7", "response": f"{i} 3 4"}) + "\n" for i in range(6)]
    (tmp_path / "a.jsonl").write_text("".join([*lines, '{"prompt": "5"}\n']))
    (source,) = open_sources(DataOptions(path=str(tmp_path / "a.jsonl")))
    encoder = Encoder(word_tokenizer(), 20)

    def conversations() -> Conversations:
        return Conversations([source], encoder, Workers(tmp_path / "cache", 1), Faults(1))

    first = conversations()
    store = BlockStore(tmp_path / "cache" / key_of(source, encoder))
    name = store.write(encode_block(source, encoder, range(7)))
    block = store.read(name)
    assert block is not None and first.missing == 7
    wanted, count = plain(block), 0
    for how in harmed(store.folder / name, most):
        found = store.read(name)
        assert found is None or plain(found) == wanted, how
        count += found is None
    assert count > 0.9 * most
    file = store.folder / name
    content = file.read_bytes()
    assert conversations().missing == 1  # but for what was wrong, which may have been mended
    file.write_bytes(content[64:])  # as earlier versions wrote it
    assert conversations().missing == 1
    file.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    assert conversations().missing == 7 and not file.exists()


@pytest.mark.parametrize("most", [12, pytest.param(40, marks=MANY)])
def test_open_records_damaged_spool_file_is_rewritten(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafttrain.data.records.SMALL", 10)
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": str(i), "response": "b"} for i in range(9)]))
    csv = "".join(f"{i},b\n" for i in range(9))
    (tmp_path / "a.csv").write_text(f"prompt,response\n{csv}")
    for name in ("a.json", "a.csv"):

        def records(name: str = name) -> list[Any]:
            found = open_records(tmp_path / name, None, tmp_path / name[2:])
            return [found.digest, [found[i] for i in range(len(found))]]

        wanted = records()
        for file in sorted((tmp_path / name[2:]).iterdir()):
            for how in harmed(file, most):
                assert records() == wanted, how
