"""Prompt lookup against a search in plain Python, and through the decoder."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.prompt_lookup import FAMILY, PromptLookup, PromptLookupOptions
from drafttrain.model.drafter import Commit
from drafttrain.ops.lookup import reference
from drafttrain.targets.fast import FastTarget
from tests.helpers import prompts, tiny_model


@pytest.fixture(scope="module")
def target() -> FastTarget:
    return FastTarget(tiny_model())


def naive(text: list[int], most: int | None, least: int, length: int) -> list[int]:
    """What followed the longest earlier occurrence of the text's end, the last of equally long ones."""
    last = len(text) - 1
    for size in range(min(last, most or last), least - 1, -1):
        for end in range(last - 1, size - 2, -1):
            if text[end - size + 1 : end + 1] == text[last - size + 1 :]:
                return text[end + 1 : end + 1 + length]
    return []


def brought(drafter: PromptLookup, texts: list[list[int]], pieces: int) -> Any:
    """A state that has seen each slot's text, its last token the root, in pieces of random sizes."""
    state, chance = drafter.open(len(texts), 80), random.Random(pieces)
    state.reset(torch.arange(len(texts)))
    done = [0] * len(texts)
    for piece in range(pieces):
        ends = [len(t) - 1 if piece == pieces - 1 else chance.randint(d, len(t) - 1) for t, d in zip(texts, done, strict=True)]
        counts, A = [e - d for e, d in zip(ends, done, strict=True)], 1 + max(e - d for e, d in zip(ends, done, strict=True))
        token_BA, next_BA = torch.full((len(texts), A), 63), torch.full((len(texts), A), 63)
        for row, (text, begin, count) in enumerate(zip(texts, done, counts, strict=True)):
            token_BA[row, :count] = torch.tensor(text[begin : begin + count], dtype=torch.long)
            next_BA[row, :count] = torch.tensor(text[begin + 1 : begin + 1 + count], dtype=torch.long)
        state.observe(Commit(token_BA, next_BA, {}, torch.tensor(counts)), torch.arange(len(texts)))
        done = ends
    return state


@pytest.mark.sampled
@pytest.mark.parametrize("vocab", [1, 2, 4, 30])
@pytest.mark.parametrize(("most", "least"), [(3, 1), (2, 2), (1, 1), (None, 1), (None, 4)])
def test_prompt_lookup_drafts_equal_search_for_longest_latest_match(
    most: int | None, least: int, vocab: int, target: FastTarget
) -> None:
    drafter = PromptLookup(PromptLookupOptions(max_ngram=most, min_ngram=least, draft_length=6), target)
    chance = random.Random(5)
    for pieces in (1, 3, 8):
        texts = [[chance.randrange(vocab) for _ in range(chance.randint(2, 70))] for _ in range(5)]
        state = brought(drafter, texts, pieces)
        for depth in (None, 1, 4):
            with torch.inference_mode():
                tree = state.propose(torch.arange(5), Sampling(), depth)
            found = [tokens[:count] for tokens, count in zip(tree.token_BN.tolist(), tree.count_B.tolist(), strict=True)]
            steps = min(6, depth or 6)
            assert found == [[t[-1], *naive(t, most, least, steps)] for t in texts]
            twin_BN, twin_B = reference(state.token_SP, state.length_S, state.power_P, torch.arange(5), most, least, steps)
            assert torch.equal(tree.token_BN, twin_BN) and torch.equal(tree.count_B, twin_B)


@pytest.mark.parametrize("most", [3, None])
def test_prompt_lookup_verifications_equal_naive_search(most: int | None, target: FastTarget) -> None:
    asked = [p * 2 for p in prompts(4, seed=3)]
    drafter = PromptLookup(PromptLookupOptions(max_ngram=most, draft_length=5), target)
    decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=40)
    plain = Decoder(target, None, "greedy", Sampling(), max_new_tokens=40).run(asked, 4).results
    saved = 0
    for prompt, result, text in zip(asked, decoder.run(asked, 3).results, plain, strict=True):
        known, rounds, nodes, whole = len(prompt) + 1, 0, 0, prompt + text.tokens
        while known < len(whole):
            draft = naive(whole[:known], most, 1, 5)
            right = next((i for i, t in enumerate(draft) if whole[known + i : known + i + 1] != [t]), len(draft))
            known, rounds, nodes = known + right + 1, rounds + 1, nodes + len(draft)
        assert (result.tokens, result.verifications) == (text.tokens, rounds)
        assert result.nodes == nodes, "padding is no draft"
        assert sum(result.offered) - sum(result.accepted) <= rounds
        saved += len(text.tokens) - 1 - rounds
    assert saved > 0


def test_prompt_lookup_without_match_decodes_plainly(target: FastTarget) -> None:
    drafter = PromptLookup(PromptLookupOptions(min_ngram=30, max_ngram=30), target)
    result = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=20).run([[1, 2, 3]]).results[0]
    assert result.verifications == 19 and result.offered == [] and result.nodes == 0


def test_prompt_lookup_invalid_lengths_are_refused(target: FastTarget) -> None:
    for wrong in ({"min_ngram": 0}, {"max_ngram": 1, "min_ngram": 2}, {"draft_length": 0}):
        with pytest.raises(UserError, match=r"^drafter\.\w+ is .*; set "):
            FAMILY.build(PromptLookupOptions(**wrong), target)
