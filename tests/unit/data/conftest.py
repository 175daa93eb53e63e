"""The embedded target for commands that ask it for a few tokens: loaded once, and not by each of them."""

from __future__ import annotations

import pytest

from drafttrain.runs import answerers
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(TargetOptions())


@pytest.fixture
def loaded_once(monkeypatch: pytest.MonkeyPatch, loaded: LoadedTarget) -> None:
    load_once(monkeypatch, loaded)


def load_once(patch: pytest.MonkeyPatch, loaded: LoadedTarget) -> None:
    """For `drafttrain prepare`."""
    patch.setattr(answerers, "load_target", lambda options: loaded if options == TargetOptions() else load_target(options))
