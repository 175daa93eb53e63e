"""Monitors, exactness, the two-sample test and the likelihood of outputs.

Shapes: B rows, N positions, R logit rows, V vocabulary.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.guards import counted, ends_in_loop, longest_repeat, missed_stop
from drafttrain.measure.exactness import Match, chi_square_tail, compare, first_difference, p_value, two_sample
from drafttrain.measure.quality import mean_log_likelihood
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import Taps, TargetOut

STOP = frozenset({0})


class FixedTarget:
    """The same logits at every position."""

    shape, placeholder = SimpleNamespace(max_positions=6), None

    def __init__(self, logits: list[float]) -> None:
        self.logits_V = torch.tensor(logits)

    def __call__(
        self, token_BN: Tensor, kv: KVCache | None, ancestor: None, position_BN: Tensor, taps: Taps, logit_row_BR: Tensor
    ) -> TargetOut:
        return TargetOut(self.logits_V.expand(*logit_row_BR.shape, -1))


class RoutedTarget(FixedTarget):
    """A pass of several rows, or of further tokens, chooses another expert, which changes the second logit."""

    def __init__(self, logits: list[float], changed: float) -> None:
        super().__init__(logits)
        self.changed, self.longest = changed, 0

    def __call__(
        self, token_BN: Tensor, kv: KVCache | None, ancestor: None, position_BN: Tensor, taps: Taps, logit_row_BR: Tensor
    ) -> TargetOut:
        assert kv is None
        self.longest = max(self.longest, token_BN.shape[1])
        alone = token_BN.shape == (1, int(logit_row_BR[0, 0]) + 1)
        logits_V = self.logits_V + torch.tensor([0.0, 0.0 if alone else self.changed, 0.0])
        return TargetOut(logits_V.expand(*logit_row_BR.shape, -1))


def test_longest_repeat_counts_repeated_tokens() -> None:
    assert longest_repeat([1, 2, 1, 2, 1, 2, 9]) == 6
    assert longest_repeat([1, 2, 1, 2, 9]) == 0
    assert longest_repeat([]) == 0


def test_ends_in_loop_requires_long_repeated_tail() -> None:
    assert ends_in_loop([9, 8] + [1, 2, 3] * 6)
    assert not ends_in_loop([1, 2, 3] * 6 + [9])
    assert not ends_in_loop([5] * 10)  # too short to call a loop
    assert not ends_in_loop([5] * 40 + [0], STOP)


def test_monitors_count_loops_and_missed_stop_tokens() -> None:
    assert missed_stop([1, 2], STOP)
    assert not missed_stop([1, 0], STOP)
    assert counted([[1] * 20, [1, 2, 0]], STOP) == {"loops": 1, "stop_misses": 1, "longest_repeat": 20}


def test_first_difference_finds_mismatch_and_early_end() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_divergence_is_explained_by_rounding_of_narrow_dtype_alone(subtests: pytest.Subtests) -> None:
    for dtype, logits, match in (
        (torch.float32, [8.0, 8.0, 0.0], Match.UNEXPLAINED),
        (torch.bfloat16, [8.0, 7.95, 0.0], Match.EXPLAINED),
        (torch.bfloat16, [8.0, 7.5, 0.0], Match.UNEXPLAINED),
        (torch.bfloat16, [7.0, 6.99, 8.0], Match.UNEXPLAINED),  # neither token is the greatest
    ):
        with subtests.test(dtype=dtype, logits=logits):
            target = FixedTarget(logits)
            assert compare(target, dtype, [[2]], [[2, 0, 2]], [[2, 1, 2]]) == [match]
            assert compare(target, dtype, [[2]], [[2, 0]], [[2, 0]]) == [Match.SAME]


def test_divergence_is_explained_by_penalised_logits() -> None:
    """Tokens 0 and 1 are near-ties once the penalties of the output, token 0, are taken off; token 2 is of the prompt alone."""
    target, sampling = FixedTarget([9.0, 7.97, 0.0]), Sampling(presence_penalty=0.5, frequency_penalty=0.5)
    assert compare(target, torch.bfloat16, [[2]], [[0, 0]], [[0, 1]], sampling=sampling) == [Match.EXPLAINED]
    assert compare(target, torch.bfloat16, [[2]], [[0, 0]], [[0, 1]]) == [Match.UNEXPLAINED]
    biased = Sampling(logit_bias={1: 1.0}, repetition_penalty=1.5)
    assert compare(FixedTarget([9.0, 8.0, 0.0]), torch.bfloat16, [[2]], [[0]], [[1]], sampling=biased) == [Match.EXPLAINED]


def test_divergence_by_near_tie_of_experts_is_told_from_fault() -> None:
    """Logits 8 and 7.5: rounding alone does not bridge them, a pass of another shape that chooses other experts may."""
    for changed, match in ((0.6, Match.EXPLAINED), (0.3, Match.UNEXPLAINED), (0.0, Match.UNEXPLAINED)):
        target = RoutedTarget([8.0, 7.5, 0.0], changed)
        assert compare(target, torch.bfloat16, [[2]], [[2, 0, 2]], [[2, 1, 2]]) == [match]
        assert target.longest <= target.shape.max_positions
        assert compare(target, torch.float32, [[2]], [[2, 0, 2]], [[2, 1, 2]]) == [Match.UNEXPLAINED]


def test_chi_square_tail_equals_published_tables() -> None:
    for statistic, freedom, p in ((3.841, 1, 0.05), (18.307, 10, 0.05), (5.0, 0, 1.0)):
        assert chi_square_tail(statistic, freedom) == pytest.approx(p, abs=1e-4)


def draws(law: list[float], count: int, seed: int) -> list[int]:
    return torch.multinomial(torch.tensor(law), count, True, generator=torch.Generator().manual_seed(seed)).tolist()


def test_two_sample_test_separates_equal_and_different_distributions() -> None:
    law = [0.5, 0.3, 0.15, 0.05]
    assert two_sample(draws(law, 400, 1), draws(law, 400, 2)) > 0.01
    assert two_sample(draws(law, 400, 1), draws([0.3, 0.5, 0.15, 0.05], 400, 2)) < 1e-4


def test_two_sample_p_values_are_calibrated() -> None:
    law = [0.4, 0.3, 0.2, 0.1]
    small = sum(two_sample(draws(law, 300, 2 * i), draws(law, 300, 2 * i + 1)) < 0.1 for i in range(200))
    assert 5 <= small <= 40  # 20 are expected; another stream of random numbers stays within four standard deviations


def test_p_value_treats_early_end_as_outcome() -> None:
    long, short = [[1, 2, 3, 4]] * 200, [[1, 2]] * 200
    assert p_value(long, long) == 1.0
    assert p_value(long, short) < 1e-6


def test_mean_log_likelihood_is_per_output_token() -> None:
    target = FixedTarget([math.log(0.5), math.log(0.3), math.log(0.2)])
    wanted = (math.log(0.5) + math.log(0.2) + math.log(0.3)) / 3
    assert mean_log_likelihood(target, [[0, 1], [2]], [[0, 2], [1]]) == pytest.approx(wanted)
    assert mean_log_likelihood(target, [], []) is None
