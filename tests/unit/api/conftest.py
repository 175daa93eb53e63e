"""The Python API composes a configuration for each drafter, as a command does."""

from __future__ import annotations

import pytest

from tests import composing


@pytest.fixture(autouse=True)
def composed_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, quicker in composing.PATCHES:
        monkeypatch.setattr(owner, name, quicker)
