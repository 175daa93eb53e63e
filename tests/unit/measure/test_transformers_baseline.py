"""transformers' `generate` as it is called for the baseline."""

from __future__ import annotations

import logging

import pytest
from transformers.utils import logging as theirs

from drafttrain.measure import DecodeOptions
from drafttrain.measure.transformers_baseline import generate
from tests.helpers import prompts, tiny_target


def test_transformers_baseline_without_stop_tokens_decodes_to_limit_silently(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call said that `eos_token_id` should be positive."""
    monkeypatch.setattr(theirs.get_logger("transformers"), "propagate", True)
    monkeypatch.setattr(theirs.get_logger("transformers"), "level", logging.WARNING)
    model = tiny_target().model
    model.generation_config.eos_token_id = 5  # not this baseline's
    with caplog.at_level(logging.WARNING):
        found = generate(model, prompts(3), frozenset(), DecodeOptions(max_new_tokens=12, min_new_tokens=4))
    assert [len(result.tokens) for result in found.results] == [12] * 3
    assert "eos_token_id" not in caplog.text
