"""Exports are written to a disk that need not survive."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk takes longer to sync than all else; `tests/unit/core/test_files.py` has what must be synced."""
    monkeypatch.setattr("os.fsync", lambda file: None)
