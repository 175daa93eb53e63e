"""Learning rates at the points that define them."""

import pytest

from drafttrain.train import TrainOptions
from drafttrain.train.optimizer import learning_rate


def test_learning_rate_of_cosine_wsd_and_constant_equals_formula() -> None:
    cosine = TrainOptions(steps=100, lr=2.0, warmup=0.1, schedule="cosine", min_lr=0.1)
    assert learning_rate(cosine, 0) == pytest.approx(0.2)
    assert learning_rate(cosine, 9) == pytest.approx(2.0)
    assert learning_rate(cosine, 55) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(cosine, 99) < 0.21
    wsd = TrainOptions(steps=100, lr=2.0, warmup=0.1, schedule="wsd", decay=0.2)
    assert [learning_rate(wsd, s) for s in (10, 79, 90)] == pytest.approx([2.0, 2.0, 1.0])
    assert learning_rate(TrainOptions(steps=100, lr=2.0, schedule="constant"), 99) == 2.0


def test_learning_rate_of_longer_run_keeps_its_warm_up() -> None:
    constant = TrainOptions(steps=200, lr=2.0, warmup=0.1, schedule="constant")
    assert learning_rate(constant, 10) == pytest.approx(1.1) and learning_rate(constant, 10, first_steps=100) == 2.0
    wsd = TrainOptions(steps=200, lr=2.0, warmup=0.1, schedule="wsd", decay=0.2)
    assert [learning_rate(wsd, s, 100) for s in (10, 100, 159, 180)] == pytest.approx([2.0, 2.0, 2.0, 1.0])
