"""The checkpoint that a user names: by its own directory, by a run's, or by a recipe's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions
from drafttrain.drafters.checkpoint import TEMPLATE
from drafttrain.runs import checkpoint_source
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.options import RunOptions
from drafttrain.runs.placement import load_for_training
from drafttrain.targets.load import load_target


def test_checkpoint_source_of_run_and_of_recipe_is_best_checkpoint_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint_source, "read_meta", lambda directory: None)
    monkeypatch.setattr(checkpoint_source, "best_checkpoint", lambda folder: folder / "step-00020")
    for run in ("2026-01-01", "2026-01-02", "2026-01-03"):  # the last one has no checkpoint yet
        for step in (20, 40) if run != "2026-01-03" else ():
            (tmp_path / run / "checkpoints" / f"step-{step:05}").mkdir(parents=True)
        (tmp_path / run).mkdir(exist_ok=True)
        (tmp_path / run / "run.json").touch()
    newest = tmp_path / "2026-01-02" / "checkpoints"
    for named, said in ((tmp_path, ", of the newest of 3 runs"), (newest.parent, ""), (newest, "")):
        assert CheckpointSource.of(str(named)).directory == newest / "step-00020"
        assert capsys.readouterr().err.replace("\n", "") == f"checkpoint: {newest / 'step-00020'}{said}"
    with pytest.raises(UserError, match="2026-01-03"):
        CheckpointSource.of(str(tmp_path / "2026-01-03"))


def test_target_has_the_template_of_the_data_in_fit_and_that_of_the_run_with_its_checkpoint(tmp_path: Path) -> None:
    template = tmp_path / "run" / TEMPLATE
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00001"
    checkpoint.mkdir(parents=True)
    template.write_text("{{ messages }}")
    options = RunOptions(data=DataOptions(template=str(template)))
    placement: Any = SimpleNamespace(placement="replicated")
    own = load_target(options.target).tokenizer.chat_template
    assert load_for_training(options, placement).tokenizer.chat_template == "{{ messages }}" != own
    for directory, expected in ((checkpoint, "{{ messages }}"), (tmp_path / "run" / "checkpoints", own)):
        loaded = CheckpointSource(directory).load(options.target, dtype="bfloat16")  # as `verify` sets its own
        assert loaded.tokenizer.chat_template == expected and loaded.target.dtype == torch.bfloat16
