"""Compositions that cost little: each test here asks for many."""

from __future__ import annotations

import pytest

from tests import composing


@pytest.fixture(autouse=True)
def quick_compositions(monkeypatch: pytest.MonkeyPatch) -> None:
    composing.compose_quickly(monkeypatch)
