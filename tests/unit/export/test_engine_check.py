"""What our decoder accepts of a chain, counted as engines count it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from drafttrain.core.errors import UserError
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, save_drafter
from drafttrain.export.engine_check import GREEDY, DecodedSequence, Ending, chain_drafter, decoded, plain
from drafttrain.export.opened import Opened
from tests.contract.test_families import NAMES, SHAPES
from tests.exports import TEXTS, drafter_of, loaded, opened, record_of
from tests.helpers import FEW, prompts

NEVER = Ending(frozenset(), 24)


def test_decoded_sequence_last_step_is_counted_as_engine_counts(subtests: pytest.Subtests) -> None:
    """One token of the prefill, sequences of 3 and 4 tokens, of which 3 and 1 are within five."""
    sequence = DecodedSequence(list(range(12)), [2, 3, 1], 1)
    for ends, counts in (("whole", [2, 3]), ("cut", [2, 1]), ("capped", [2, 0]), ("none", [2, 0])):
        with subtests.test(ends=ends):
            assert sequence.counted(Ending(frozenset(), 5), ends) == counts


def test_decoded_sequence_stop_token_ends_counts_like_length() -> None:
    sequence = DecodedSequence([9, 8, 7, 6, 5, 4, 3, 2, 1], [2, 3, 0], 1)
    assert sequence.counted(Ending(frozenset({5}), 100), "cut") == [2, 1]
    assert sequence.counted(Ending(frozenset({5}), 3), "cut") == [2]
    assert sequence.counted(Ending(frozenset({9}), 100), "whole") == []
    assert DecodedSequence([9, 8, 7, 6], [2, 0], 0).counted(Ending(frozenset(), 3), "cut") == [2]


@pytest.mark.slow
@pytest.mark.sampled(case=("eagle3", "dflash"))  # a tree to cut, and a block
@pytest.mark.parametrize("case", ["eagle3", "eagle", "medusa", "dflash", "draft_model"])
def test_chain_accepted_counts_equal_decoder(tmp_path: Path, case: str) -> None:
    """A drafter's tree is left aside, and nothing past a text's end counts within it."""
    found, _ = opened(tmp_path, case)
    target, drafter = found.loaded.target, chain_drafter(found, 3, "float32")
    assert set(drafter.proposal.paths) <= {(0,) * depth for depth in range(1, 16)}
    texts = plain(target, TEXTS, NEVER)
    stops = frozenset({texts[0][9]})
    for ending in (NEVER, Ending(stops, 24), Ending(stops, 5)):
        usual = Decoder(target, drafter, "greedy", GREEDY, ending.stop_ids, ending.max_new_tokens).run(TEXTS).results
        for prompt, result, text in zip(TEXTS, usual, plain(target, TEXTS, ending), strict=True):
            sequence = decoded(target, drafter, prompt, ending, 3, "plain")
            assert result.tokens == text == sequence.tokens[: ending.of(sequence.tokens)]
            counts = sequence.counted(ending, "cut")
            assert [sum(count > i for count in counts) for i in range(len(result.accepted))] == result.accepted
            assert len(counts) == result.verifications


def test_chain_drafting_from_prompt_equals_drafting_after_prefill(tmp_path: Path) -> None:
    """What is drafted behind a prompt's last token is what would be drafted, had the prefill yielded that one."""
    found, _ = opened(tmp_path, "draft_model")
    target, drafter = found.loaded.target, chain_drafter(found, 3, "float32")
    ending = Ending(frozenset(), 12)
    for prompt, (first, *_) in zip(TEXTS, plain(target, TEXTS, ending), strict=True):
        usual = decoded(target, drafter, prompt, ending, 3, "plain")
        behind = decoded(target, drafter, [*prompt, first], ending, 3, "drafted")
        assert behind.first == 0 and usual.tokens[1:12] == behind.tokens[:11]
        assert usual.accepted[:3] == behind.accepted[:3]
    with pytest.raises(UserError, match="a prompt has one token, and this engine drafts from the first token on"):
        decoded(target, drafter, [3], NEVER, 3, "drafted")


def test_chain_too_long_for_drafter_or_target_is_refused(tmp_path: Path) -> None:
    found, _ = opened(tmp_path, "medusa")
    with pytest.raises(UserError, match=r"decode\.draft_length is 4; this drafter drafts 3, set it from 1 to that"):
        chain_drafter(found, 4, "float32")
    with pytest.raises(UserError, match="exceed the target's"):
        decoded(found.loaded.target, chain_drafter(found, 3, "float32"), TEXTS[0], Ending(frozenset(), 10**6), 3, "plain")


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", NAMES)
def test_chain_of_each_family_checkpoint_decodes_as_plain_decoding(name: str, tmp_path: Path) -> None:
    """Whatever its tensors are called."""
    target, options = loaded(), families()[name].options(**SHAPES.get(name, {}))
    drafter = drafter_of(name, options, target)
    meta = CheckpointMeta(name, asdict(options), drafter.decode_settings(), record_of(target), step=1)
    save_drafter(tmp_path, drafter.state_dict(), meta)
    found, ending, prompt = Opened.of(tmp_path, target), Ending(frozenset(), 12), prompts(1, seed=8)[0]
    assert set(found.tensors) == set(drafter.state_dict())
    length = min(3, found.drafter.draft_length)
    sequence = decoded(target.target, chain_drafter(found, length, "float32"), prompt, ending, length, "plain")
    assert [sequence.tokens[:12]] == plain(target.target, [prompt], ending)
