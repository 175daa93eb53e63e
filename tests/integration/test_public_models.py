"""Public models rather than random ones: the fast runner's logits and texts, plain and drafted, are transformers'.

The data is no part of the project: DRAFTTRAIN_TEST_DATA names its folder, else shared/data beside the checkout is looked for.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters import families
from drafttrain.measure import DecodeOptions
from drafttrain.measure.bench import generate
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets import TargetOptions
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.load import LoadedTarget, load_target

DATA = Path(os.environ.get("DRAFTTRAIN_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
pytestmark = pytest.mark.skipif(not (DATA / "models").is_dir(), reason=f"no public models at {DATA}")


@pytest.fixture(params=["stories260K", "babyllama-361", "babyllama-105in361"])
def loaded(request: pytest.FixtureRequest) -> LoadedTarget:
    return load_target(TargetOptions(name="hf", path=str(DATA / "models" / request.param)))


def stories(loaded: LoadedTarget, count: int, longest: int = 60) -> list[list[int]]:
    lines = (DATA / "prompts" / "tinystories_prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [list(loaded.tokenizer(json.loads(line)["turns"][0])["input_ids"])[:longest] for line in lines]


def test_fast_target_public_model_logits_and_states_equal_transformers(loaded: LoadedTarget) -> None:
    assert isinstance(loaded.target, FastTarget)
    with torch.inference_mode():
        for prompt in stories(loaded, 4):
            token = torch.tensor([prompt])
            theirs = loaded.target.model(token, output_hidden_states=True)
            position = torch.arange(len(prompt))[None]
            whole = loaded.target(token, None, None, position, Taps((0,), final=True))
            cached = loaded.target(token, loaded.target.new_cache(1, 64), None, position, Taps((0,), final=True))
            for ours in (whole, cached):
                torch.testing.assert_close(ours.logits_BRV, theirs.logits, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(ours.hidden[0], theirs.hidden_states[1], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(ours.hidden[FINAL], theirs.hidden_states[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_decoder_public_model_plain_and_drafted_text_equals_transformers(loaded: LoadedTarget) -> None:
    target, asked, family = loaded.target, stories(loaded, 8), families()["draft_model"]
    drafter = family.build(family.options(blocks=max(1, target.shape.blocks - 1), draft_length=3), target).eval()
    wanted = [generate(target.model, [p], target.stop_ids, DecodeOptions(max_new_tokens=60)).results[0].tokens for p in asked]
    for contender in (None, drafter):
        for batch in (1, 3):
            results = Decoder(target, contender, "greedy", Sampling(), target.stop_ids, 60).run(asked, batch).results
            assert [r.tokens for r in results] == wanted
