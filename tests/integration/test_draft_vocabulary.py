"""A drafter whose vocabulary the training data chose, through the command line: kill and resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.test_training import arguments, digest, fit, kill_after, last_weights, once


@pytest.mark.slow
def test_draft_vocabulary_killed_run_resumes_to_same_weights(material: Path, tmp_path: Path) -> None:
    steps = ("recipe=eagle3", "drafter.draft_vocab=20", "train.steps=20", "train.checkpoint_every=5")
    whole = once(material, *steps)
    kill_after(arguments(material, tmp_path, *steps, "resume=auto"), tmp_path, lines=7)
    assert digest(fit(material, tmp_path, *steps, "resume=auto")) == digest(whole)
    tensors = load_file(last_weights(whole))
    assert tensors["lm_head.weight"].shape[0] == len(tensors["d2t"]) == int(tensors["t2d"].sum()) == 20
    letters = tensors["t2d"].nonzero()[:, 0]
    assert int(letters.min()) > 1, "the special tokens are in no text, every letter is"
