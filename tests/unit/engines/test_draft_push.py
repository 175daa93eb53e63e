"""Drafts that are written for an engine to read again: which of them stay."""

from __future__ import annotations

import os
from pathlib import Path

from drafttrain.engines.draft_push import PushedDrafter, ReloadedDirectory


def test_reloaded_directory_keeps_newest_drafts_whatever_their_steps(tmp_path: Path) -> None:
    """A loop that starts again counts from 1, in the folder of the loop before."""
    for age, step in enumerate((400, 500, 600)):
        (tmp_path / f"draft-{step:07d}").mkdir()
        os.utime(tmp_path / f"draft-{step:07d}", (1000 + age, 1000 + age))
    (tmp_path / "draft-notes").mkdir()
    seen: list[Path] = []
    directory = ReloadedDirectory(tmp_path, seen.append, keep=2)
    for step in (1, 2):
        directory.receive(PushedDrafter(step, lambda: iter(()), lambda folder: (folder / "config.json").touch()))
        assert (seen[-1] / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft-0000001", "draft-0000002", "draft-notes"]
