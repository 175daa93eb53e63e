"""Trainers and servers of states that are killed at random moments; `benchmarks/engine_kills.py` does it more often."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine_kills import campaign


@pytest.mark.slow
def test_kills_of_trainers_and_servers_change_no_bit(material: Path, tmp_path: Path) -> None:
    counts = campaign(material, tmp_path / "kills", 3, seed=1, servers=2, processes=2, steps=("train.steps=20",))
    assert counts["trainer"] + counts["server"] == 3
