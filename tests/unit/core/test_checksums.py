"""A directory's list of checksums that is no such list is refused: something else lies under its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafttrain.core.errors import UserError
from drafttrain.core.files import LISTED, check_listed, list_files


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "a.json").write_text('{"version": "1"}')
    (tmp_path / "b.bin").write_bytes(b"b")
    list_files(tmp_path)
    check_listed(tmp_path, "make it again")
    return tmp_path


def test_check_listed_list_swapped_with_other_file_is_refused(directory: Path) -> None:
    other = (directory / "a.json").read_bytes()
    (directory / LISTED).rename(directory / "a.json")
    (directory / LISTED).write_bytes(other)
    for wanted in ("a.json", "b.bin"):
        with pytest.raises(UserError, match=rf"{LISTED}: expected checksums, got something else .*; make it again"):
            check_listed(directory, "make it again", lambda name, wanted=wanted: name == wanted)  # type: ignore[misc]


def test_check_listed_list_with_invalid_checksum_is_refused(directory: Path) -> None:
    for value in (1, "0" * 63 + "g"):
        (directory / LISTED).write_text(json.dumps({"a.json": value}))
        with pytest.raises(UserError, match="expected checksums, got something else"):
            check_listed(directory, "make it again")
