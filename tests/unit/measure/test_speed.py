"""Times and the budget, on invented clocks: no machine's speed is asserted; and the roofline of a decode step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Costs, Decoded
from drafttrain.measure import speed
from drafttrain.measure.cases import Budget, Case, Plan, alternate_categories, plan, waves, waves_of
from drafttrain.measure.speed import Race, costs, race, speedup, throughput, tpot, ttft
from drafttrain.targets.fast import FastTarget
from tests.helpers import tiny_model


def lap(*times: tuple[int, float, float, float]) -> Decoded:
    """(tokens, started, first, ended) of each request."""
    return Decoded(
        [Result(i, 3, [1] * n, n - 1, n - 1, started=s, first=f, ended=e) for i, (n, s, f, e) in enumerate(times)], Costs()
    )


def test_tpot_pools_tokens_and_ttft_averages_requests() -> None:
    laps = [lap((11, 0.0, 1.0, 3.0)), lap((2, 5.0, 5.5, 6.0))]
    assert tpot(laps) == pytest.approx(2.5 / 11)
    assert ttft(laps) == pytest.approx(0.75)


def test_throughput_divides_wave_tokens_by_wall_time() -> None:
    wave = [lap((11, 0.0, 1.0, 3.0), (6, 0.0, 1.0, 2.0))]
    assert throughput(wave) == pytest.approx(15 / 2)
    assert throughput(wave, prefill=True) == pytest.approx(17 / 3)
    assert throughput([lap((1, 0.0, 1.0, 1.0))]) is None


def test_speedup_compares_each_repeat_with_its_baseline() -> None:
    baseline = [[lap((11, 0, 0, 2.0))], [lap((11, 0, 0, 4.0))], [lap((11, 0, 0, 3.0))]]
    ours = [[lap((11, 0, 0, 1.0))], [lap((11, 0, 0, 1.0))], [lap((11, 0, 0, 1.0))]]
    ratio = speedup(baseline, ours)
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((3.0, 2.0, 4.0))


def test_contenders_alternate_on_every_wave() -> None:
    order: list[tuple[str, int]] = []

    def contender(name: str):  # type: ignore[no-untyped-def]
        return lambda wave: order.append((name, wave[0])) or lap((2, 0, 0, 1))

    laps = race({n: contender(n) for n in ("plain", "ours", "other")}, [[0], [1]], repeats=2, once=frozenset({"other"}))
    first = [(n, w) for w in (0, 1) for n in ("plain", "ours", "other")]
    assert order == first + [(n, w) for n, w in first if n != "other"]
    assert [len(laps[n]) for n in ("plain", "ours", "other")] == [2, 2, 1]


def test_timed_slice_uses_only_waves_within_slice() -> None:
    timed = Race(2, [[0, 1], [2, 3]], {"plain": [[lap((2, 0, 0, 1)), lap((2, 0, 0, 3))]]})
    assert timed.of("plain", {2, 3, 9})[0][0].results[0].ended == 3
    assert timed.of("plain", {1, 2}) == []
    assert timed.of("absent") == []


def test_costs_of_repeats_are_summed() -> None:
    total = costs([[Decoded([], Costs(1, 2, 3, 4, 5))], [Decoded([], Costs(1, 1, 1, 1, 1))]])
    assert total == Costs(2, 3, 4, 5, 6)


def test_timing_plan_cuts_waves_before_repeats() -> None:
    plans = [plan(1.0, seconds, 16, 3) for seconds in (100.0, 21.0, 2.0, 0.0)]
    assert plans == [Plan(16, 3), Plan(7, 3), Plan(1, 2), Plan(1, 1)]
    assert [plan(1.0, seconds, 16, 3, least=4) for seconds in (21.0, 9.0, 0.0)] == [Plan(7, 3), Plan(4, 2), Plan(4, 1)]
    assert plan(1.0, 0.0, 2, 3, least=4) == Plan(2, 1)


def test_budget_never_stops_before_forty_prompts() -> None:
    budget = Budget(seconds=1.0)
    assert not budget.enough(39, 1e6, passes=3)
    assert budget.enough(40, 1e6, passes=3)
    assert not budget.enough(400, 0.1, passes=3)


def test_alternate_categories_spreads_every_prefix() -> None:
    cases = [Case(str(i), c, [1]) for i, c in enumerate("aaabbc")]
    assert [c.category for c in alternate_categories(cases)] == list("abcaba")
    assert [c.question_id for c in alternate_categories(cases)] == list("035142")
    assert waves(5, 2) == [[0, 1], [2, 3], [4]]


def test_waves_of_cases_hold_one_adapter_each_and_alternate() -> None:
    cases = [Case(str(i), "a", [1], adapter=name) for i, name in enumerate([None, "sql", None, "chat", "sql", None, "sql"])]
    assert waves_of(cases, range(7), 2) == [[0, 2], [1, 4], [3], [5], [6]]
    assert waves_of(cases, [6, 5, 0], 2) == [[6], [5, 0]]


def test_step_roofline_is_weight_and_kv_bytes_over_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FastTarget(tiny_model())
    results = [SimpleNamespace(prompt_tokens=10, tokens=[1] * 4), SimpleNamespace(prompt_tokens=7, tokens=[1] * 6)]
    wave: Any = SimpleNamespace(results=results, costs=SimpleNamespace(weight_bytes=3 * 500, steps=3))
    monkeypatch.setattr(speed, "memory_bandwidth", lambda device: 1000.0)
    cache = target.cache_bytes()
    assert cache.states == 0 and cache.position == 2 * 4 * 2 * 8 * 4
    found = speed.step_floor(cache, wave, torch.device("cuda"))
    assert found == (500 + 2 * 4 * 2 * 8 * 4 * 22) / 1000.0
    with_states = speed.step_floor(replace(cache, states=50), wave, torch.device("cuda"))
    assert with_states == pytest.approx(found + 2 * 2 * 50 / 1000.0)  # of two requests, read and written
    assert speed.step_floor(cache, wave, torch.device("cpu")) is None


def test_step_roofline_without_cuda_graph_is_none() -> None:
    wave: Any = SimpleNamespace(results=[], costs=SimpleNamespace(weight_bytes=0, steps=3))
    assert speed.step_floor(FastTarget(tiny_model()).cache_bytes(), wave, torch.device("cuda")) is None


def test_memory_bandwidth_is_that_of_faster_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    for copy, read, faster in ((2.0, 0.5, 1 / 0.5), (0.5, 2.0, 2 / 0.5)):
        taken = iter([copy, read])
        monkeypatch.setattr(speed, "_repeated", lambda work, repeats, device, taken=taken: work() is not None and next(taken))
        assert speed.memory_bandwidth(torch.device("cpu"), size=64, repeats=10) == 64 * 10 * faster
