"""The fallback controller on a simulated clock, and in the loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from time import perf_counter
from typing import Any

import pytest

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.draft_length import Fallback
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.targets.fast import FastTarget
from tests.helpers import Scripted, never, oracle, prompts, random_guess, tiny_model, tiny_target


def simulate(
    alpha: float, cost: dict[int, float], steps_of_plain: int, noise: float = 0.1, seed: int = 0, rows: int = 1
) -> tuple[float, list[int]]:
    """(seconds over plain decoding's for equal tokens, the depths taken). alpha: chance of each draft."""
    rng, fallback = random.Random(seed), Fallback(max(cost))
    spent, tokens, depths = 0.0, 0, []
    while tokens < steps_of_plain * rows:
        depth = fallback.depth(rows)
        reached = []
        for _ in range(rows):
            accepted = 0
            while accepted < depth and rng.random() < alpha:
                accepted += 1
            reached.append(accepted)
        low, high = max(d for d in cost if d <= depth), min(d for d in cost if d >= depth)
        base = cost[low] if low == high else cost[low] + (cost[high] - cost[low]) * (depth - low) / (high - low)
        seconds = base * (1 + noise * abs(rng.gauss(0, 1)))
        fallback.record(rows, depth, seconds, sum(reached) + rows, reached)
        spent, tokens = spent + seconds, tokens + sum(reached) + rows
        depths.append(depth)
    return spent / (tokens / rows * cost[0] * (1 + noise * 0.8)), depths


seeds = pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 5), marks=pytest.mark.grid)], ids=str)


@seeds
def test_fallback_drafter_never_right_costs_at_most_three_percent(seeds: range, subtests: pytest.Subtests) -> None:
    for seed, cost in product(seeds, ({0: 1.0, 4: 1.5}, {0: 1.0, 4: 4.0}, {0: 1.0, 8: 2.0})):
        with subtests.test(seed=seed, cost=cost):
            ratio, depths = simulate(0.0, cost, 1500, seed=seed)
            assert ratio <= 1.03
            assert sum(d > 0 for d in depths) >= 2  # it goes on trying


@seeds
def test_fallback_good_drafter_keeps_drafting(seeds: range, subtests: pytest.Subtests) -> None:
    for seed in seeds:
        with subtests.test(seed=seed):
            ratio, depths = simulate(0.8, {0: 1.0, 4: 1.5}, 1500, seed=seed)
            assert ratio < 0.52  # 3.4 tokens for 1.5
            assert sum(d >= 2 for d in depths) > 0.95 * len(depths)


def test_fallback_mediocre_drafter_uses_shorter_drafts() -> None:
    """Depth 8 costs 2.6 plain steps and gives 1.67 tokens; depth 1 costs 1.2 and gives 1.4."""
    ratio, depths = simulate(0.4, {0: 1.0, 8: 2.6}, 3000, noise=0.02)
    assert ratio < 0.97
    assert sum(d in (1, 2) for d in depths) > 0.8 * len(depths)


def test_fallback_resumes_drafting_when_acceptance_returns() -> None:
    rng, fallback = random.Random(0), Fallback(4)
    depths = []
    for step in range(4000):
        depth = fallback.depth(2)
        alpha = 0.0 if step < 1000 else 0.9
        reached = [sum(1 for _ in range(depth) if rng.random() < alpha) for _ in range(2)]
        fallback.record(2, depth, 1.0 + 0.12 * depth, sum(reached) + 2, reached)
        depths.append(depth)
    assert sum(d > 0 for d in depths[200:1000]) < 200
    assert sum(d == 4 for d in depths[2500:]) > 1300


def test_fallback_unaffordable_first_draft_gives_plain_step() -> None:
    fallback = Fallback(60)  # estimated to cost 7.5 plain steps
    for _ in range(3):
        fallback.record(1, 0, 1e-3, 1, [0])
    assert fallback.depth(1) == 0


def test_fallback_decides_separately_by_batch_size() -> None:
    fallback, drafted = Fallback(4), {1: 0, 32: 0}
    for _ in range(300):
        for rows, cost in ((1, 1.2), (32, 4.0)):
            depth = fallback.depth(rows)
            drafted[rows] += depth > 0
            fallback.record(rows, depth, cost if depth else 1.0, rows * (2 if depth else 1), [1 if depth else 0] * rows)
    assert drafted[1] > 280 and drafted[32] < 10


class Priced(Fallback):
    """A depth costs what it says, whatever the clock says."""

    def record(self, rows: int, depth: int, seconds: float, emitted: int, reached: list[int]) -> None:
        assert seconds > 0.0
        super().record(rows, depth, 1.0 + 0.12 * depth, emitted, reached)


@pytest.mark.parametrize("kind", [oracle, never])
def test_decoder_with_fallback_tokens_equal_plain_decoding(kind: Callable[..., Any]) -> None:
    target, asked = FastTarget(tiny_model()), prompts(4, seed=3)
    plain = [r.tokens for r in Decoder(target, None, "greedy", Sampling(), max_new_tokens=60).run(asked, 1).results]
    drafter = Scripted(kind([p + t for p, t in zip(asked, plain, strict=True)]), [[0] * d for d in range(1, 5)])
    decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=60, controls=Controls(fallback=True))
    decoder.fallback = Priced(4)
    results = decoder.run(asked, 2).results
    assert [r.tokens for r in results] == plain
    if kind is never:
        assert sum(r.nodes for r in results) < 0.5 * 4 * sum(r.verifications for r in results)


@pytest.mark.parametrize("fallback", [False, True])
def test_decoder_step_costs_sum_to_less_than_elapsed_time(fallback: bool) -> None:
    drafter = Scripted(random_guess(2), [[0], [0, 0]])
    controls = Controls(fallback=fallback)
    decoder = Decoder(tiny_target(), drafter, "greedy", Sampling(), max_new_tokens=20, controls=controls)
    began = perf_counter()
    costs = decoder.run(prompts(2), 2).costs
    parts = [costs.draft, costs.verify, costs.commit, costs.host]
    assert min(parts) > 0.0 and sum(parts) < perf_counter() - began
