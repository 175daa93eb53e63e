"""Cuts of a step at one length for all rows, and at each row's own."""

from __future__ import annotations

import torch

from benchmarks.ragged import Step, counts, rates


def step(accepted: list[int]) -> Step:
    """Three rows of three drafts: a sure one, a doubtful one, and one that is sure of its first draft."""
    confidence_BK = torch.tensor([[0.9, 0.9, 0.9], [0.2, 0.5, 0.5], [0.9, 0.5, 0.5]], dtype=torch.float64)
    return Step(confidence_BK.cumprod(1), torch.tensor(accepted))


def test_ragged_cut_takes_most_likely_drafts_of_step() -> None:
    one = step([3, 0, 1])
    assert [one.ragged(drafts).tolist() for drafts in range(6)] == [
        [0, 0, 0], [1, 0, 0], [1, 0, 1], [2, 0, 1], [3, 0, 1], [3, 0, 2],
    ]  # fmt: skip
    assert one.ragged(9).tolist() == [3, 3, 3] and one.even(2).tolist() == [2, 2, 2]
    assert (one.kept(one.even(1)), one.kept(one.ragged(3)), one.kept(one.ragged(4))) == (2, 3, 4)


def test_ragged_cut_keeps_more_drafts_at_higher_rate_than_even_cut() -> None:
    steps = [step([3, 0, 1]), step([2, 1, 1])]
    first = counts(steps)[0]
    assert (first["drafts"], first["accepted"], first["even_keeps"], first["ragged_keeps"]) == (6, 8, 5, 6)
    assert first["ragged_needs"] == 6, "one product keeps five with the first two drafts of row 0 and the first of row 2"
    whole, even, ragged = rates(steps, lambda tokens: 1.0, 0.5)
    assert whole == even == ragged == (6 + 8) / 3.0, "where tokens cost nothing, everything is verified"
    whole, even, ragged = rates(steps, lambda tokens: 1.0 + 0.2 * tokens, 0.5)
    assert ragged > even > whole
