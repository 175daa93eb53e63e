"""Laws against transformers' warpers; noise against what uniform numbers must be."""

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from drafttrain.sampling import Lane, Sampling, choose, law, pick, uniform


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0), (0.7, 0, 1.0, 0), (1.3, 5, 1.0, 0), (0.9, 0, 0.8, 0.1), (1.0, 7, 0.6, 0), (1.2, 0, 1.0, 0.05)],
)
def test_law_equals_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1.0:
        warped = TopPLogitsWarper(top_p)(None, warped)
    if min_p:
        warped = MinPLogitsWarper(min_p)(None, warped)
    torch.testing.assert_close(law(logits, Sampling(temperature, top_k, top_p, min_p=min_p)), warped.softmax(-1))


def test_greedy_law_is_a_one_hot() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert law(logits, Sampling()).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert choose(logits, Sampling(), torch.tensor([0])).tolist() == [1]


def test_pick_inverts_the_cumulative_sum_and_never_takes_probability_zero() -> None:
    laws = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).expand(5, 5)
    draws = torch.tensor([0.0, 0.2499, 0.25, 0.9999999999, 1.0 - 2**-53], dtype=torch.float64)
    assert pick(laws, draws).tolist() == [1, 1, 3, 3, 3]


def test_noise_is_uniform_keyed_and_independent_between_lanes() -> None:
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


@pytest.mark.parametrize("bad", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.2}])
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="set it"):
        Sampling(**bad)
