"""Trainers and servers of states that are killed at random moments; `tests/faults/engine_kills.py` does it more often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.engine_kills import campaign
from tests.standin.mooncake import needs_mooncake


@pytest.mark.grid  # test_engine_features kills a trainer, and a server, once each
def test_engine_states_random_kills_of_trainer_and_server_keep_weights(material: Path, tmp_path: Path) -> None:
    counts = campaign(material, tmp_path / "kills", 3, seed=1, servers=2, processes=2, steps=("train.steps=20",))
    assert counts["trainer"] + counts["server"] == 3


@needs_mooncake
@pytest.mark.grid
def test_mooncake_states_random_kills_with_master_keep_weights(material: Path, tmp_path: Path) -> None:
    """The master is killed too."""
    more = {"steps": ("train.steps=20",), "transport": "mooncake"}
    counts = campaign(material, tmp_path / "kills", 3, seed=2, servers=2, processes=2, **more)  # type: ignore[arg-type]
    assert sum(counts[name] for name in ("trainer", "server", "master")) == 3
