"""Sampled texts follow the target's own distribution, whatever drafts: enumerated on a vocabulary of five tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from tests.architectures import WINDOW, model_of
from tests.cases import slow_but
from tests.contract.test_targets import EXACT, runner_of
from tests.distributions import Texts, of_texts, tail
from tests.tiny import build

VOCAB, LENGTH, COUNT = 5, 3, 1500
PROMPT = [1, 4, 2, 2, 0, 3, 1] * 3  # longer than windows and chunks
SAMPLING = Sampling(0.7, seed=5)
FEW = ("DeepSeek-V3", "gpt-oss")  # by drafts that are drawn, and by trees that are not
OTHERS = ("GPT-2", "Falcon", "Bamba", "Qwen3-Next")  # in make test-slow: learned and rotary positions, two kinds of recurrence
assert len(PROMPT) > 2 * WINDOW


@cache
def target_of(name: str) -> Any:
    model = model_of(name, vocab_size=VOCAB)
    return runner_of(model)(model)


@cache
def expected(name: str) -> Texts:
    return of_texts(model_of(name, vocab_size=VOCAB), PROMPT, SAMPLING, LENGTH)


@pytest.mark.sampled(name=(*FEW, *OTHERS))
@pytest.mark.parametrize("name", slow_but(FEW, EXACT))
def test_target_speculative_samples_follow_exact_distribution(name: str) -> None:
    """Texts of three tokens jointly; drafts of trees and chains, drawn and not drawn (in turns), that are often wrong."""
    target, family = target_of(name), ("draft_model", "medusa")[EXACT.index(name) % 2]
    chain = {} if target.trees or family != "medusa" else {"paths": [[0], [0, 0], [0, 0, 0]]}
    decoder = Decoder(target, build(family, target, noise=1.0, **chain), "lossless", SAMPLING, max_new_tokens=LENGTH)
    results = decoder.run([PROMPT] * COUNT, 250).results
    assert tail(expected(name), (tuple(r.tokens) for r in results)) > 1e-6
    assert sum(sum(r.accepted) for r in results) > 0  # drafts were accepted, and so tested


def test_exact_distribution_check_rejects_wrong_target_or_temperature() -> None:
    """Samples of one target do not pass for another's, nor do those at another temperature."""
    target = target_of("Llama")
    results = Decoder(target, None, "lossless", SAMPLING, max_new_tokens=LENGTH).run([PROMPT] * COUNT, 250).results
    texts = [tuple(r.tokens) for r in results]
    assert tail(expected("Llama"), texts) > 1e-6
    other = of_texts(model_of("Llama", vocab_size=VOCAB), PROMPT, Sampling(1.0), LENGTH)
    assert tail(other, texts) < 1e-6 and tail(expected("GPT-2"), texts) < 1e-6
