"""`fit` of a drafter that learns nothing: no engine, a checkpoint of its settings, a report like any other run's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.core.tree import DraftTree
from drafttrain.decoding.acceptance import POLICIES, AcceptedPath, Policy, greedy
from drafttrain.train import trainer

Command = Callable[..., int]
SMALL = (
    *("measure.limit=3", "measure.minutes=0.01", "measure.transformers=false", "measure.batch_sizes=[2]"),
    *("measure.timed_prompts=1", "decode.max_new_tokens=24"),
)


@pytest.mark.slow
def test_fit_drafter_without_parameters_skips_training_and_measures(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an engine is started")

    monkeypatch.setattr(trainer, "TrainingEngine", refuse)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert command("fit", "recipe=prompt_lookup", "drafter.draft_length=4", *SMALL) == 0
    (run,) = Path("outputs/prompt_lookup").iterdir()
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000" and load_file(checkpoint / "drafter.safetensors") == {}
    files = {"checksums.json", "drafter.json", "drafter.safetensors", "trainer.json"}
    assert {p.name for p in checkpoint.iterdir()} == files
    report = json.loads((run / "report.json").read_text())
    (entry,) = report["checkpoints"]
    assert report["training"] is None and report["drafter"]["parameters"] == 0
    assert entry["tau"] >= 1.0 and entry["exact_matches"] == 3 and entry["speedup"] > 0.0
    assert {entry[key] for key in ("expected_tau", "expected_gap", "expected_tau_all_positions")} == {None}
    assert json.loads((run / "run.json").read_text())["finished"] and (run / "metrics.jsonl").read_text() == ""
    assert list(run.glob("wandb/offline-run-*/*.wandb"))
    assert "0 trainable parameters" in (said := capsys.readouterr().out) and "data:" not in said
    assert command("measure", f"checkpoint={checkpoint}", *SMALL, "decode=sampling") == 0
    assert len(list(Path("outputs/measure").glob("*/report.json"))) == 1

    def wrong(tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, *rest: Any) -> AcceptedPath:
        return greedy(tree, ancestor_BNN, logits_BNV.flip(-1) if tree.token_BN.shape[1] > 1 else logits_BNV, *rest)

    monkeypatch.setitem(POLICIES, "greedy", Policy("greedy", True, wrong))
    capsys.readouterr()
    assert command("measure", f"checkpoint={checkpoint}", *SMALL) == 4
    assert "outputs differ from plain decoding" in capsys.readouterr().err


def test_fit_drafter_without_parameters_unfinished_run_resumes(command: Command) -> None:
    asked = ("fit", "recipe=prompt_lookup", "logger=none", "measure.enabled=false", "resume=auto")
    assert command(*asked) == 0
    (run,) = Path("outputs/prompt_lookup").iterdir()
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"finished": False}))
    assert command(*asked) == 0
    assert list(Path("outputs/prompt_lookup").iterdir()) == [run]
    assert json.loads((run / "run.json").read_text())["finished"]
