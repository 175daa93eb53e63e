"""An export that is not what was written any more is refused by all that read it, in one line that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from drafttrain.commands.verify import record_of
from drafttrain.core.errors import UserError
from drafttrain.core.files import LISTED, list_files
from drafttrain.export import convert, hub
from drafttrain.export.convert import converted
from drafttrain.export.exporter import CARD, TARGET
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.hub import Repository, push
from drafttrain.export.opened import Opened
from drafttrain.model.lora import LoraSpec
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target, load_tokenizer
from tests.damage import refused
from tests.exports import loaded, opened, written

HASHED, SEALED = 12, 100  # bytes that are tried of a file under a checksum, and of the list of checksums
SLOW, GRID = pytest.mark.slow, pytest.mark.grid
EXPORTS = [  # case, stack, how it is exported, and how many bytes of each file are tried
    ("medusa", "vllm", {}, HASHED),
    pytest.param("medusa", "vllm", {}, 120, marks=SLOW),
    pytest.param("draft_model", "transformers", {}, HASHED, marks=SLOW),
    pytest.param("draft_model", "transformers", {}, 120, marks=GRID),
    pytest.param("draft_model-lora", "transformers", {"adapter": True}, HASHED, marks=SLOW),
    pytest.param("draft_model-lora", "transformers", {"adapter": True}, 120, marks=GRID),
]
GGUFS = [
    ("dflash", "llamacpp", {}, HASHED),
    pytest.param("draft_model", "llamacpp", {"with_target": True}, HASHED, marks=SLOW),
    pytest.param("draft_model", "llamacpp", {"with_target": True}, 120, marks=GRID),
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "cache_home", lambda: tmp_path / "cache")


def files(out: Path) -> Iterator[Path]:
    """Those that are read."""
    return (path for path in sorted(out.rglob("*")) if path.is_file() and path.name != CARD)


def imported(out: Path) -> list[Any]:
    """All that an import is made of."""
    found = Opened.of(converted(ExternalCheckpoint(out), loaded(), lambda text: None), loaded())
    return [found.meta.family, found.meta.options, found.meta.decode, {n: x.tolist() for n, x in found.tensors.items()}]


@pytest.mark.parametrize(("case", "stack", "how", "most"), EXPORTS)
def test_import_damaged_export_is_refused(case: str, stack: str, how: dict[str, Any], most: int, tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", case)
    written(found, golden, stack, tmp_path / "out", **how)

    def read() -> list[Any]:
        return imported(tmp_path / "out")

    shares = refused((file for file in files(tmp_path / "out") if file.name != LISTED), read, most, removed=False)
    assert len(shares) > 2 and set(shares.values()) == {1.0}
    sealed = [tmp_path / "out" / LISTED]
    assert refused(sealed, read, max(most, SEALED), removed=False)[LISTED] > 0.9  # but for spaces and line feeds


@pytest.mark.parametrize(("case", "stack", "how", "most"), [*EXPORTS, *GGUFS])
def test_verify_and_upload_damaged_export_is_refused(
    case: str, stack: str, how: dict[str, Any], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, sent = tmp_path / "out", list[dict[str, bytes]]()
    monkeypatch.setattr(hub, "HfApi", lambda **_: Hub(sent))
    found, golden = opened(tmp_path / "run", case)
    written(found, golden, stack, out, **how)

    def uploaded() -> dict[str, bytes]:
        push(out, Repository("a/b", True), "x")
        return sent.pop() | {LISTED: b""}  # whose spaces are free

    for read in (lambda: record_of(out), uploaded):
        shares = refused((file for file in files(out) if file.name != LISTED), read, most)
        assert set(shares.values()) == {1.0}
        assert refused([out / LISTED], read, max(most, SEALED), removed=False)[LISTED] > 0.9


class Hub:
    def __init__(self, sent: list[dict[str, bytes]]) -> None:
        self.sent = sent

    def create_repo(self, name: str, **_: Any) -> None:
        pass

    def upload_folder(self, folder_path: Path, **_: Any) -> Any:
        self.sent.append({path.name: path.read_bytes() for path in files(folder_path)})
        return type("Commit", (), {"commit_url": "there"})


def test_export_of_all_stacks_lists_checksums_per_stack(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "medusa")
    written(found, golden, "all", tmp_path / "out")
    lists = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(LISTED))
    assert lists == ["out", "out/tgi", "out/vllm"]
    with pytest.raises(UserError, match="which has exports for several stacks"):
        record_of(tmp_path / "out")
    record = tmp_path / "out" / "drafttrain.json"
    record.write_bytes(record.read_bytes().replace(b"vllm", b"vlln"))
    with pytest.raises(UserError, match=r"out: drafttrain.json is damaged or cut off"):
        record_of(tmp_path / "out")
    assert record_of(tmp_path / "out" / "vllm")["stack"] == "vllm"


@pytest.mark.parametrize("most", [HASHED, pytest.param(120, marks=SLOW)])
def test_load_target_damaged_merged_target_is_refused(most: int, tmp_path: Path) -> None:
    spec = LoraSpec(rank=2, alpha=4.0, modules=("q_proj",))
    found, golden = opened(tmp_path / "run", "medusa", spec=spec)
    written(found, golden, "vllm", tmp_path / "out")
    target = tmp_path / "out" / TARGET
    options = TargetOptions(name="hf", path=str(target))

    def read() -> list[Any]:
        again = load_target(options)
        return [again.target.fingerprint, load_tokenizer(options).get_vocab(), str(again.target.model.config)]

    shares = refused((file for file in files(target) if file.name != LISTED), read, most, removed=False)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= shares.keys()
    assert set(shares.values()) == {1.0}
    assert TARGET not in (tmp_path / "out" / LISTED).read_text()


def test_import_edited_export_is_read_after_checksum_list_is_deleted(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "medusa")
    written(found, golden, "vllm", tmp_path / "out")
    wanted = imported(tmp_path / "out")
    (tmp_path / "out" / CARD).write_text("mine")  # a card is everybody's to write
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert imported(tmp_path / "out") == wanted
    record = tmp_path / "out" / "drafttrain.json"
    record.write_text(record.read_text().replace("medusa", "medusb"))
    with pytest.raises(UserError, match=f"If you changed it on purpose, delete {LISTED} there"):
        imported(tmp_path / "out")
    (tmp_path / "out" / LISTED).unlink()
    assert imported(tmp_path / "out") == wanted  # as earlier versions wrote it


def test_list_files_includes_files_of_subfolders(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "draft_model-lora")
    written(found, golden, "transformers", tmp_path / "out", adapter=True)
    names = {p.relative_to(tmp_path / "out").as_posix() for p in files(tmp_path / "out")}
    assert "base/model.safetensors" in names
    list_files(tmp_path / "out", without=(CARD,))
    text = (tmp_path / "out" / LISTED).read_text()
    assert all(name in text for name in names - {LISTED})
    with safe_open(tmp_path / "out" / "base" / "model.safetensors", "pt") as opened_file:
        assert list(opened_file.keys())
