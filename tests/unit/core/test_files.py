"""Directories and files appear whole or not at all."""

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drafttrain.core.errors import UserError
from drafttrain.core.files import (
    HOST,
    atomic_directory,
    atomic_write_json,
    atomic_write_text,
    new_file,
    read_sealed_json,
    remove_abandoned,
    remove_leftovers,
    write_sealed_json,
)
from tests.helpers import at_once


def test_atomic_directory_appears_when_complete(tmp_path: Path) -> None:
    final = tmp_path / "runs" / "a"
    for content in ("first", "second"):
        with atomic_directory(final) as aside:
            (aside / "sub").mkdir()
            (aside / "sub" / "file").write_text(content)
            assert not final.exists() or (final / "sub" / "file").read_text() == "first"
        assert (final / "sub" / "file").read_text() == content
        assert os.listdir(final.parent) == ["a"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_atomic_directory_exception_keeps_old_content(tmp_path: Path, failure: type[BaseException]) -> None:
    final = tmp_path / "a"
    with atomic_directory(final) as aside:
        (aside / "file").write_text("old")
    with pytest.raises(failure), atomic_directory(final) as aside:
        (aside / "file").write_text("half")
        raise failure
    assert (final / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_atomic_directory_syncs_files_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def number(of: int | Path) -> int:
        """A file keeps it when it gets another name."""
        return os.stat(of).st_ino

    events: list[int | str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr("os.fsync", lambda handle: (events.append(number(handle)), fsync(handle)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (events.append("rename"), rename(self, to))[1])
    with atomic_directory(tmp_path / "a") as aside:
        (aside / "file").write_text("x")
        written = [number(aside / "file"), number(aside)]
    assert events == [*written, "rename", number(tmp_path)]


def test_atomic_write_text_and_json_replace_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    atomic_write_text(path, "é")
    assert path.read_text(encoding="utf-8") == "é"
    atomic_write_json(path, {"tau": 2.3})
    assert path.read_text() == '{\n  "tau": 2.3\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        atomic_write_json(path, {"tau": float("nan")})
    assert os.listdir(path.parent) == ["report.json"]


def test_atomic_write_text_full_disk_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    atomic_write_text(tmp_path / "a", "old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="disk full while writing"):
        atomic_write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_remove_leftovers_deletes_all_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "a.tmp-1").mkdir()
    (tmp_path / "b.tmp-2").touch()
    (tmp_path / "c").touch()
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["c"]


def test_remove_abandoned_deletes_temporary_files_of_ended_processes(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    child = ended.pid
    gone = [f"a.tmp-{HOST}-{child}", f"b.tmp-old-{HOST}-{child}"]
    kept = [f"a.tmp-{HOST}-{os.getpid()}", f"a.tmp-elsewhere-{child}", "a", "tmp-1"]
    for name in (*gone, *kept):
        (tmp_path / name).mkdir()
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_atomic_write_text_lone_surrogate_is_escaped(tmp_path: Path) -> None:
    """A path or an argument has them where the locale is not UTF-8."""
    atomic_write_text(tmp_path / "a", "é\udcc3")
    assert (tmp_path / "a").read_text(encoding="utf-8") == r"é\udcc3"


@pytest.mark.parametrize("links", [True, False])
def test_new_files_of_same_name_are_one_for_each_process(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pictures of the same second; also on a file system without links."""

    def unsupported(source: Path, final: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr("os.link", unsupported)
    paths = at_once(8, lambda number: new_file(tmp_path / "kind" / "now.html", str(number).encode()))
    assert sorted(path.name for path in paths) == ["now-2.html", *(f"now-{n}.html" for n in range(3, 9)), "now.html"]
    assert all(path.read_text() == str(number) for number, path in enumerate(paths))
    assert len(list((tmp_path / "kind").iterdir())) == 8


def test_sealed_json_with_numbers_as_keys_is_read_back(tmp_path: Path) -> None:
    write_sealed_json(tmp_path / "sealed.json", {"bias": {13: -5.0, 9: 1.0}})
    assert read_sealed_json(tmp_path / "sealed.json", "it", "write it") == {"bias": {"9": 1.0, "13": -5.0}}
