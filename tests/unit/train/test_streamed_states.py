"""The file that keeps a target's states: a run does not depend on it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console as RichConsole

from drafttrain.core.errors import UserError
from drafttrain.targets.frozen_ends import KnownStates
from drafttrain.train import streamed_states
from drafttrain.train.progress import Console
from drafttrain.train.streamed_states import StreamedStates

KNOWN = KnownStates([1, 2], {0: torch.ones(2, 4)}, torch.zeros(2, 4), "fingerprint")


@pytest.mark.parametrize("full", [False, True])
def test_streamed_states_unwritable_cache_still_returns_states(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that is read-only or full must not cost the run what took long to compute."""
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" if not full else tmp_path))
    monkeypatch.setattr(streamed_states, "stream", lambda *given: KNOWN)
    monkeypatch.setattr(StreamedStates, "_ids", lambda self: KNOWN.ids)
    monkeypatch.setattr(StreamedStates, "_key", lambda self, ids: "key")
    if full:

        def no_space(*given: Any) -> None:
            raise UserError("disk full while writing it")

        monkeypatch.setattr(streamed_states, "atomic_write_bytes", no_space)
    ends: Any = SimpleNamespace(target=None, pieces=SimpleNamespace(bytes=10, count=1))
    said = StringIO()
    console = Console(RichConsole(file=said, width=400))
    assert StreamedStates(cast(Any, ends), 64)._known(console, lambda number: None) is KNOWN
    assert "but not kept: " in said.getvalue()
