"""The memory floor of a decode step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafttrain.measure import floor
from drafttrain.measure.floor import kv_bytes
from drafttrain.targets.fast import FastTarget
from tests.helpers import tiny_model


def test_step_roofline_is_weight_and_kv_bytes_over_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FastTarget(tiny_model())
    results = [SimpleNamespace(prompt_tokens=10, tokens=[1] * 4), SimpleNamespace(prompt_tokens=7, tokens=[1] * 6)]
    wave: Any = SimpleNamespace(results=results, costs=SimpleNamespace(weight_bytes=3 * 500, steps=3))
    monkeypatch.setattr(floor, "copy_bandwidth", lambda device: 1000.0)
    cache = target.cache_bytes()
    assert cache.states == 0 and cache.position * 22 == kv_bytes(target.shape, target.dtype, 22) == 2 * 4 * 2 * 8 * 4 * 22
    found = floor.step_floor(cache, wave, torch.device("cuda"))
    assert found == (500 + 2 * 4 * 2 * 8 * 4 * 22) / 1000.0
    with_states = floor.step_floor(replace(cache, states=50), wave, torch.device("cuda"))
    assert with_states == pytest.approx(found + 2 * 2 * 50 / 1000.0)  # of two requests, read and written
    assert floor.step_floor(cache, wave, torch.device("cpu")) is None


def test_step_roofline_without_cuda_graph_is_none() -> None:
    wave: Any = SimpleNamespace(results=[], costs=SimpleNamespace(weight_bytes=0, steps=3))
    assert floor.step_floor(FastTarget(tiny_model()).cache_bytes(), wave, torch.device("cuda")) is None
