"""Counts, intervals and predictions against figures worked out by hand.

Shapes: M samples, K draft depth.
"""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.request import Result
from drafttrain.measure.acceptance import pooled, wilson
from drafttrain.measure.expected import expected_tau, forced_batch, gap
from drafttrain.objective.losses import Hits


def result(emitted: int, verifications: int, offered: list[int], accepted: list[int], nodes: int) -> Result:
    return Result(0, 4, [0] * (emitted + 1), verifications, emitted, offered, accepted, nodes)


def test_acceptance_counts_are_pooled_not_averaged() -> None:
    counts = pooled([result(9, 3, [3, 3], [3, 3], 6), result(1, 1, [1], [], 2)])
    assert counts.tau == 10 / 4
    assert (counts.offered, counts.accepted) == ((4, 3), (3, 3))
    assert counts.alpha == 6 / 7
    assert [a[0] for a in counts.alpha_by_position] == [0.75, 1.0]
    assert counts.rejection_overhead == pytest.approx(1 - 6 / 8)


def test_acceptance_of_plain_decoding_has_tau_one_and_no_alpha() -> None:
    counts = pooled([result(5, 5, [], [], 0)])
    assert (counts.tau, counts.alpha, counts.rejection_overhead, counts.alpha_by_position) == (1.0, None, None, [])


def test_acceptance_without_verifications_has_no_tau() -> None:
    assert pooled([]).tau is None


def test_wilson_interval_equals_published_values() -> None:
    intervals = {(8, 10): (0.4902, 0.9433), (0, 10): (0.0, 0.2775), (10, 10): (0.7225, 1.0), (500, 1000): (0.4691, 0.5309)}
    for (hits, trials), (low, high) in intervals.items():
        assert wilson(hits, trials) == pytest.approx((hits / trials, low, high), abs=1e-4)


def test_wilson_more_successes_than_trials_is_refused() -> None:
    with pytest.raises(ValueError, match="5 hits in 3 trials"):
        wilson(5, 3)


def hits(ranks: list[list[int]], mass: float = 0.5) -> Hits:
    rank_MK = torch.tensor(ranks).reshape(-1, 2)
    return Hits(rank_MK, torch.full(rank_MK.shape, mass), [len(rank_MK)])


CHAIN, TREE = [(0,), (0, 0)], [(0,), (1,), (0, 0)]


def test_expected_tau_over_all_positions_is_one_plus_accepted_paths() -> None:
    rows = [hits([[0, 0], [0, 5], [1, 0], [9, 9]])]
    assert expected_tau(rows, CHAIN, sampled=False, visited=False) == 1 + 2 / 4 + 1 / 4
    assert expected_tau(rows, TREE, sampled=False, visited=False) == 1 + 2 / 4 + 1 / 4 + 1 / 4


def test_expected_tau_counts_visited_positions_only() -> None:
    easy, hard = [[0, 0]] * 6, [[9, 9]] * 6
    rows = [hits(easy + hard)]
    assert expected_tau(rows, CHAIN, sampled=False, visited=False) == 2.0
    assert expected_tau(rows, CHAIN, sampled=False) == pytest.approx(12 / 8)  # 2 leaps of 3 tokens, 6 steps of 1


def test_expected_tau_of_sampled_chain_follows_overlap() -> None:
    rows = [hits([[9, 9]] * 400, mass=0.5)]
    assert expected_tau(rows, CHAIN, sampled=True) == pytest.approx(1 + 0.5 + 0.25)


def test_expected_tau_without_samples_is_none() -> None:
    assert expected_tau([hits([])], CHAIN, sampled=False) is None
    assert gap(None, 2.0) is None
    assert gap(2.2, 2.0) == pytest.approx(0.1)


def test_forced_batch_supervises_output_tokens_only() -> None:
    batch = forced_batch([5, 6], [7, 8, 9])
    assert batch.token_BT.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.mask_BT.tolist() == [[False, False, True, True, True]]
    assert batch.position_BT.tolist() == [[0, 1, 2, 3, 4]]
