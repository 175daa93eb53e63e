"""transformers' `generate` as it is called for the baseline."""

from __future__ import annotations

import logging

import pytest
from transformers import GenerationConfig
from transformers.utils import logging as theirs

from drafttrain.decoding.scheduler import Decoder
from drafttrain.measure import DecodeOptions
from drafttrain.measure.bench import generate
from drafttrain.measure.decoding import sampling_of
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


def test_transformers_baseline_of_model_with_own_generation_settings_decodes_greedily(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, decode, model = prompts(3), DecodeOptions(max_new_tokens=8), tiny_target().model

    def texts() -> list[list[int]]:
        return [result.tokens for result in generate(model, asked, frozenset(), decode).results]

    wanted = texts()
    theirs_own = GenerationConfig(
        suppress_tokens=sorted({token for text in wanted for token in text}), return_dict_in_generate=True, output_scores=True,
        num_return_sequences=2, num_beams=2, repetition_penalty=3.0, sequence_bias=[[[wanted[0][0]], -9.0]], max_length=9,
        cache_implementation="static", prompt_lookup_num_tokens=3, token_healing=True,
    )  # fmt: skip
    monkeypatch.setattr(model, "generation_config", theirs_own)
    assert texts() == wanted
    assert model.generation_config is theirs_own


def test_transformers_baseline_decodes_with_logit_bias_and_repetition_penalty() -> None:
    asked, target = prompts(3), tiny_target()
    decode = DecodeOptions(max_new_tokens=12, repetition_penalty=1.3, logit_bias={5: 2.0, 9: -1.0})
    theirs = [result.tokens for result in generate(target.model, asked, frozenset(), decode).results]
    ours = Decoder(target, None, "greedy", sampling_of(decode), max_new_tokens=12).run(asked, 3).results
    assert [result.tokens for result in ours] == theirs
    assert theirs != [r.tokens for r in generate(target.model, asked, frozenset(), DecodeOptions(max_new_tokens=12)).results]
