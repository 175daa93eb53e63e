"""Answers that the target writes: what is requested, what is refused, and that the state which is missing is never read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import collate
from drafttrain.features import FeatureOptions
from drafttrain.features.answers import AnswerError, AnswerRequest, Writing, unlikely
from drafttrain.features.online import Online
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.runs.training_job import check_packing
from drafttrain.train import TrainOptions
from drafttrain.train.step_batches import Answers, answered
from tests.helpers import FEW, tiny_target
from tests.tiny import NAMES, build

WRITING = Writing(1.0, 8, (7, 11), 16)


def row(prompt: int, reply: int, before: int = 0) -> Encoded:
    """A conversation with a reply of `before` tokens inside its prompt, and a last reply."""
    mask = np.zeros(prompt + reply, np.bool_)
    mask[2 : 2 + before] = True
    mask[prompt:] = True
    return Encoded(np.arange(prompt + reply, dtype=np.int32), mask)


def requests(*rows: Encoded, first: int = 0, seed: int = 0, writing: Writing = WRITING) -> list[AnswerRequest]:
    states: Any = SimpleNamespace(writing=writing)
    return Answers(states, seed, lambda rows: collate(rows, 0)).requests(rows, first)


def test_answers_requests_end_before_last_reply_with_seed_by_row_index() -> None:
    a, b = requests(row(5, 3, before=1), row(12, 2))
    assert (a.prompt, a.room) == (list(range(5)), 8) and (b.prompt, b.room) == (list(range(12)), 4)
    (again,) = requests(row(12, 2), first=1)
    assert again == b, "a resumed run asks for the same"
    others = requests(row(12, 2), first=2) + requests(row(12, 2), first=1, seed=1)
    assert len({one.seed for one in (a, b, *others)}) == 4 and all(0 <= one.seed < 2**31 for one in others)


def test_answered_conversation_supervises_answer_tokens_only() -> None:
    found = answered([5, 6, 7], [8, 9])
    assert found.token_ids.tolist() == [5, 6, 7, 8, 9] and found.mask.tolist() == [False] * 3 + [True] * 2
    assert collate([answered([5, 6], [7])], 0).supervised() == 1, "an answer of its end token alone"


def test_answer_request_fields_set_sampling_stop_and_transfer_parameters() -> None:
    (one,) = requests(row(12, 2))
    fields = one.fields()
    assert fields["max_tokens"] == 4 and fields["temperature"] == 1.0 and fields["seed"] == one.seed
    assert fields["stop_token_ids"] == [7, 11] and fields["ignore_eos"] and fields["return_token_ids"]
    assert fields["kv_transfer_params"] == {"include_output_tokens": True}
    assert fields["top_p"] == 1.0 and fields["top_k"] == 0 and fields["repetition_penalty"] == 1.0


def test_answer_request_read_accepts_complete_and_refuses_incomplete_answer(subtests: pytest.Subtests) -> None:
    (one,) = requests(row(12, 2))
    for ids, finish in (([7], "stop"), ([3, 4, 11], "stop"), ([3, 4, 5, 6], "length"), ([3, 4, 5, 7], "stop")):
        with subtests.test(whole=ids, finish=finish):
            assert one.read({"choices": [{"token_ids": ids, "finish_reason": finish}]}) == ids
    for ids, finish in (([3, 4], "stop"), ([3, 4], "length"), ([3, 4], "abort"), ([], "abort"), ([3, 4, 5, 6, 7], "stop")):
        with (
            subtests.test(incomplete=ids, finish=finish),
            pytest.raises(AnswerError, match=f"an answer of {len(ids)} tokens that ended by '{finish}', at most 4"),
        ):
            one.read({"choices": [{"token_ids": ids, "finish_reason": finish}]})


def test_unlikely_accepts_tokens_sampled_by_target_and_reports_others() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_AV = 3 * torch.randn(64, 50, generator=generator)
    near_AV = logits_AV + 0.05 * torch.randn(64, 50, generator=generator)
    random_A = torch.randint(50, (64,), generator=generator)
    for temperature in (0.0, 0.7, 1.0):
        p_AV = (near_AV / (temperature or 1e-6)).softmax(1)
        for _ in range(20):
            sampled_A = torch.multinomial(p_AV, 1, generator=generator)[:, 0]
            assert unlikely(logits_AV, sampled_A, temperature) is None
        assert unlikely(logits_AV, random_A, temperature) is not None
    repeated_A = torch.multinomial(logits_AV.softmax(1), 1, generator=generator)[:, 0].repeat_interleave(2)[:64]
    assert "its log-likelihood under the target is" in str(unlikely(logits_AV, repeated_A, 1.0))


def test_answers_plain_text_full_prompt_or_packed_rows_are_refused() -> None:
    with pytest.raises(UserError, match=r"the data has plain text without replies"):
        requests(row(1, 9))
    with pytest.raises(UserError, match=r"a prompt has 16 tokens, which leave .*; lower data.max_length"):
        requests(row(16, 2))
    with pytest.raises(UserError, match=r"data.pack fills rows by the lengths of the given replies"):
        check_packing(True, TrainOptions(), tiny_target(), build("medusa", tiny_target()), None, answers=True)


def test_feature_options_answers_invalid_value_is_refused() -> None:
    for features, line in (
        (FeatureOptions("online", answers=True), "needs an engine to write them, but features is online; set features=engine"),
    ):
        with pytest.raises(UserError, match=line):
            features.check(64)


def test_feature_options_answers_default_request_timeout_is_longer() -> None:
    assert FeatureOptions("engine").request_timeout == 120 and FeatureOptions("engine", answers=True).request_timeout == 600
    assert FeatureOptions("engine", answers=True, timeout=7.0).request_timeout == 7


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("prompt_lookup", "suffix")])  # these are not trained
def test_objective_state_of_last_answer_token_changes_no_loss_or_gradient(name: str) -> None:
    """Whatever stands there, the loss and every gradient have the same bits."""
    target = tiny_target()
    drafter = build(name, target)
    if not drafter.trained or drafter.adapts is not None:
        pytest.skip("features=engine refuses it")
    rows = [answered(list(range(3, 9)), [12, 13, 14, 15, 16, 17, 18]), answered(list(range(20, 24)), [30, 31, 32, 33])]
    filled = Online(target, drafter.taps).fill(collate(rows, 0))
    objective, found = Objective(drafter.train(), target, LossOptions()), []
    for value in (0.0, 3.0):
        for state_BTH in filled.hidden.values():
            state_BTH[0, 12], state_BTH[1, 7] = value, value
        drafter.zero_grad()
        torch.manual_seed(0)
        loss, _ = objective(filled)
        loss.backward()
        found.append([loss.detach()] + [p.grad.clone() for p in drafter.parameters() if p.grad is not None])
    assert len(found[0]) > 1 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
