"""Laws against transformers' warpers; noise against what uniform numbers must be."""

from itertools import product

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from drafttrain.core.sampling import Lane, Sampling, choose, distribution, per_node, pick, shaped, uniform


def test_distribution_equals_transformers_warpers(subtests: pytest.Subtests) -> None:
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    for temperature, top_k, top_p, min_p in (
        (1.0, 0, 1.0, 0),
        (0.7, 0, 1.0, 0),
        (1.3, 5, 1.0, 0),
        (0.9, 0, 0.8, 0.1),
        (1.0, 7, 0.6, 0),
        (1.2, 0, 1.0, 0.05),
    ):
        with subtests.test(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p):
            warped = TemperatureLogitsWarper(temperature)(None, logits)
            if top_k:
                warped = TopKLogitsWarper(top_k)(None, warped)
            if top_p < 1.0:
                warped = TopPLogitsWarper(top_p)(None, warped)
            if min_p:
                warped = MinPLogitsWarper(min_p)(None, warped)
            found = distribution(logits, Sampling(temperature, top_k, top_p, min_p=min_p))
            torch.testing.assert_close(found, warped.softmax(-1))


SETTINGS = [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}]


def test_distribution_equals_softmax_of_shaped_logits(subtests: pytest.Subtests) -> None:
    for dtype, settings in product((torch.float64, torch.float32, torch.bfloat16), SETTINGS):
        with subtests.test(dtype=dtype, settings=settings):
            logits = torch.randn(4, 3, 30, generator=torch.Generator().manual_seed(2)).to(dtype) * 2
            sampling = Sampling(0.8, **settings)
            kept = shaped(logits, sampling)
            assert kept.dtype == dtype and bool((kept == logits)[kept > -torch.inf].all())
            assert (kept is logits) == (not settings)
            wide = kept if dtype == torch.float64 else kept.float()
            torch.testing.assert_close(distribution(logits, sampling), (wide / 0.8).softmax(-1))
            assert bool(((distribution(logits, sampling) > 0) == (kept > -torch.inf)).all())


def test_shaped_equal_logits_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 0.0, 1.0]])
    for settings in ({"top_k": 3}, {"top_p": 0.85}, {"min_p": 0.1}):
        kept = shaped(logits, Sampling(1.0, **settings)) > -torch.inf
        assert kept.tolist() == [[True, True, True, True, False, True]]


def test_shaped_row_with_infinite_logit_stays_as_it_is() -> None:
    """It has no probabilities. The kernel, which compares with the greatest logit too, leaves it alone likewise."""
    logits = torch.tensor([[1.0, torch.inf, 0.0, -torch.inf], [1.0, 9.0, 0.0, -torch.inf]])
    for settings in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}):
        kept = shaped(logits, Sampling(1.0, **settings)) > -torch.inf
        assert kept.tolist() == [[True, True, True, False], [False, True, False, False]]


def test_distribution_with_temperature_per_row_equals_separate_rows() -> None:
    logits, temperature = torch.randn(2, 3, 30), torch.tensor([0.5, 1.7])
    own = distribution(logits, Sampling(1.0, top_p=0.7, temperature_B=temperature))
    for row in range(2):
        torch.testing.assert_close(own[row], distribution(logits[row], Sampling(float(temperature[row]), top_p=0.7)))
    assert torch.equal(
        distribution(logits.flatten(0, 1), Sampling(1.0, top_p=0.7, temperature_B=temperature)), own.flatten(0, 1)
    )
    assert per_node(temperature, 4).tolist() == pytest.approx([0.5, 0.5, 1.7, 1.7])
    drafting = Sampling(1.0, draft_temperature=0.3, temperature_B=temperature).drafting
    assert drafting.temperature == 0.3 and drafting.temperature_B is None


def test_sampling_device_settings_replace_host_settings() -> None:
    key, position = torch.tensor([5, 9]), torch.arange(4)
    host = Sampling(0.7, seed=12).rows(key)
    device = Sampling(1.0, key_B=key, temperature_B=torch.tensor([0.7, 0.7]), seed_1=torch.tensor([12]))
    assert torch.equal(uniform(host, position, Lane.DRAFT, 3), uniform(device, position, Lane.DRAFT, 3))
    assert torch.equal(
        uniform(host, position, Lane.DRAFT), uniform(host.rows(torch.tensor([5, 5, 9, 9])), position, Lane.DRAFT)
    )
    for sampling in (host, device):
        found = sampling.on_device(4, torch.device("cpu"))
        assert found.key_M.tolist() == [5, 5, 9, 9] and found.seed_1.tolist() == [12]
        assert found.temperature_M.dtype == torch.float32 and found.temperature_M.tolist() == pytest.approx([0.7] * 4)


def test_distribution_greedy_is_one_hot_at_lowest_index() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert distribution(logits, Sampling()).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert choose(logits, Sampling(), torch.tensor([0])).tolist() == [1]


def test_pick_inverts_cumulative_sum_and_never_picks_zero_probability() -> None:
    laws = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).expand(5, 5)
    draws = torch.tensor([0.0, 0.2499, 0.25, 0.9999999999, 1.0 - 2**-53], dtype=torch.float64)
    assert pick(laws, draws).tolist() == [1, 1, 3, 3, 3]


def test_uniform_noise_is_keyed_and_independent_between_lanes() -> None:
    position = torch.arange(20000)
    sampling = Sampling(1.0, seed=4).rows(torch.zeros(20000, dtype=torch.long))
    a, b = uniform(sampling, position, Lane.TARGET), uniform(sampling, position, Lane.DRAFT)
    assert a.min() >= 0 and a.max() < 1
    counts = torch.histc(a.float(), 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 50  # chi-square, 19 degrees of freedom: p about 1e-4
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([a[1:], a[:-1]]))[0, 1])) < 0.03
    assert torch.equal(a[5:9], uniform(sampling.rows(torch.zeros(4, dtype=torch.long)), position[5:9], Lane.TARGET))
    assert not torch.equal(a, uniform(Sampling(1.0, seed=5).rows(torch.zeros(20000, dtype=torch.long)), position, Lane.TARGET))


def test_sampling_setting_out_of_range_is_refused(subtests: pytest.Subtests) -> None:
    for bad in ({"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.2}):
        with subtests.test(bad=bad), pytest.raises(ValueError, match="set it"):
            Sampling(**bad)
