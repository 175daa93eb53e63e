"""From training to a directory that a serving stack loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drafttrain.export.golden import GOLDEN
from tests.integration.test_training import fit

SETTINGS = ("drafter=eagle3", "drafter.draft_vocab=20", "train.steps=2", "train.checkpoint_every=1")


@pytest.mark.slow
def test_export_all_formats_verifies_golden_drafts_of_fit_checkpoints(
    material: Path, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fit(material, tmp_path / "runs", *SETTINGS)
    checkpoints = sorted(run.glob("checkpoints/step-*"))
    assert len(checkpoints) == 2 and all((path / GOLDEN).is_file() for path in checkpoints)
    assert command("export", f"checkpoint={checkpoints[-1]}", "format=all", f"out={tmp_path / 'out'}", "dtype=float16") == 0
    said = capsys.readouterr().out
    assert "golden drafts: the checkpoint has none" not in said
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == [
        "sglang",
        "speculators",
        "trtllm",
        "vllm",
    ]
