"""Logins of W&B are found where wandb keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.train.wandb_run import logged_in, setting


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def login(file: Path, host: str) -> None:
    file.write_text(f"machine {host}\n  login user\n  password {'0' * 40}\n", encoding="utf-8")


def test_logged_in_netrc_entry_of_either_wandb_host_counts(home: Path) -> None:
    assert not logged_in()
    for host in ("api.wandb.ai", "api.forge.coreweave.com"):
        login(home / ".netrc", host)
        assert logged_in(), host


def test_logged_in_counts_only_login_of_server_in_use(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login for it counts only while it is in use, and one for W&B's service does not count for it."""
    login(home / ".netrc", "wandb.example.org:8080")
    assert not logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert logged_in()
    login(home / ".netrc", "api.wandb.ai")
    assert not logged_in()
    monkeypatch.delenv("WANDB_BASE_URL")
    settings = home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org:8080\nmode = offline\n", encoding="utf-8")
    assert not logged_in() and setting("mode") == "offline"
    login(home / "elsewhere", "wandb.example.org:8080")
    monkeypatch.setenv("NETRC", str(home / "elsewhere"))
    assert logged_in()


def test_logged_in_damaged_netrc_and_settings_are_ignored(home: Path) -> None:
    (home / "wandb").mkdir()
    for content in (b"\xff\xfe", b"no section", b"[default\n"):
        (home / ".netrc").write_bytes(content)
        (home / "wandb" / "settings").write_bytes(content)
        assert not logged_in() and setting("mode") is None, content
