"""What the libraries are given before they are imported."""

from __future__ import annotations

import getpass
import io
import os
import pwd
import sys
from pathlib import Path
from typing import Any

import pytest

from drafttrain.cli.main import quote
from drafttrain.cli.quiet import settle_home, settle_streams
from drafttrain.core.files import cache_home, temporary_home
from drafttrain.data import DataOptions
from drafttrain.data.sources import cache_folder

NAMES = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files; the environment names no user, no home and no folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
    temporary_home.cache_clear()
    yield tmp_path  # type: ignore[misc]
    temporary_home.cache_clear()


def no_account(number: int) -> Any:
    raise KeyError(f"getpwuid(): uid not found: {number}")


def test_settle_home_of_user_without_account_is_in_temporary_folder(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", no_account)
    own = temporary / f"drafttrain-{os.getuid()}"
    assert cache_home() == own and cache_folder(DataOptions()) == own / "data", "of the API, which settles nothing"
    settle_home()
    assert Path.home() == own and own.stat().st_mode & 0o777 == 0o700
    assert getpass.getuser() == str(os.getuid())


def test_settle_home_empty_home_is_not_working_directory(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(pwd, "getpwuid", no_account)
    settle_home()
    assert Path.home() == temporary / f"drafttrain-{os.getuid()}"


def test_settle_home_read_only_stays_and_caches_go_to_temporary_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, own = temporary / "home", temporary / f"drafttrain-{os.getuid()}"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert cache_home() == home / ".cache" / "drafttrain"
    ask = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(home) and ask(path, mode))
    settle_home()
    assert Path.home() == home and os.environ["TRITON_CACHE_DIR"] == str(own / "triton")
    assert cache_home() == own / "drafttrain" and os.environ["XDG_CACHE_HOME"] == str(own), "also for the libraries"


def test_settle_home_read_only_cache_with_files_stays_readable(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = temporary / "home"
    kept = home / ".cache" / "drafttrain" / "kernels" / "0" / "a.so"
    kept.parent.mkdir(parents=True)
    kept.touch()
    monkeypatch.setenv("HOME", str(home))
    ask = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(home) and ask(path, mode))
    settle_home()
    assert "XDG_CACHE_HOME" not in os.environ
    assert cache_home("kernels/0/a.so") == home / ".cache" / "drafttrain"
    assert cache_home() == cache_home("kernels/1/a.so") == temporary / f"drafttrain-{os.getuid()}"


def test_temporary_home_of_another_user_is_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / f"drafttrain-{os.getuid()}").symlink_to(temporary)
    assert temporary_home().parent == temporary and temporary_home().name != f"drafttrain-{os.getuid()}"


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"## - na\xefve \u6f22 \udcc3"), ("utf-8", r"██ – naïve 漢 \udcc3")])
def test_settle_streams_of_other_encodings_print_readable_text(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone surrogate stands for a byte of a name or an argument that is not of the locale's encoding."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve".encode()), encoding))
    settle_streams()
    for stream in (sys.stdout, sys.stderr):
        print("██ – naïve 漢 \udcc3", file=stream, flush=True)
        assert stream.buffer.getvalue().decode(encoding).strip() == shown  # type: ignore[attr-defined]
    assert sys.stdin.read() == "naïve"


def test_quote_text_of_ascii_locale_has_its_characters() -> None:
    escaped = "naïve".encode().decode("ascii", "surrogateescape")
    assert quote(f"prompt={escaped}") == quote("prompt=naïve") == "prompt='naïve'"
