"""Captures that fail: the reason, what is left behind, and decoding that goes on."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.decoding import graph_runner, tree_size
from drafttrain.decoding.graph_runner import CaptureError, captured_graph, why_waiting
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.probe import why_not_captured
from tests.contract.test_families import build
from tests.helpers import prompts, tiny_model, tiny_target
from tests.recorder import Graph, cpu_graphs

__all__ = ["cpu_graphs"]
CPU = torch.device("cpu")
BEFORE, CAPTURE = (SimpleNamespace(wait_stream=lambda _: None) for _ in range(2))  # streams


class Driver:
    """What torch.cuda does when work cannot be captured: the end of the capture is an error too, and undoes nothing."""

    def __init__(self, refused: int) -> None:
        """refused: the first so many captures fail."""
        self.refused, self.stream, self.begun, self.ended_pools = refused, BEFORE, 0, list[Any]()

    def graph(self, graph: Any, **named: Any) -> Any:
        self.begun += 1
        return Broken(self) if self.begun <= self.refused else self.right(graph, **named)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        self.right = graph_runner.cuda.graph
        own = {"graph": self.graph, "current_stream": lambda _: self.stream, "set_stream": self.set_stream}
        own |= {"stream": graph_runner.cuda.stream, "graph_pool_handle": lambda: (0, 7)}
        patch.setattr(graph_runner, "cuda", SimpleNamespace(**(vars(graph_runner.cuda) | own)))
        patch.setattr(graph_runner, "end_pool", lambda device, pool: self.ended_pools.append(pool))

    def set_stream(self, stream: Any) -> None:
        self.stream = stream


class Broken:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def __enter__(self) -> None:
        self.driver.stream = CAPTURE

    def __exit__(self, *error: Any) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def driver(cpu_graphs: None, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(1)
    made.install(monkeypatch)
    monkeypatch.setattr(graph_runner, "_failed", [])  # other tests count the graphs that are alive
    return made


def refused() -> None:
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


def test_captured_graph_failed_capture_raises_first_error_and_cleans_up(driver: Driver) -> None:
    with pytest.raises(CaptureError, match=r"operation not permitted when stream is capturing$"):
        captured_graph(refused, CPU)
    assert driver.stream is BEFORE and driver.ended_pools == [(0, 7)]
    assert driver.begun == 2, "a capture that ends well resets what counts captures"
    out = torch.zeros(2)
    captured_graph(lambda: out.add_(1), CPU).replay()
    assert out.tolist() == [1.0, 1.0]


def test_captured_graph_failed_capture_keeps_nothing_of_its_work(driver: Driver) -> None:
    """The graph itself stays, reset: with it no tensor that the work read or made."""
    read, seen = [torch.ones(3)], list[weakref.ref[torch.Tensor]]()

    def work() -> None:
        seen.extend(weakref.ref(x) for x in (read[0], read[0] * 2))
        refused()

    with suppress(CaptureError):
        captured_graph(work, CPU)
    read.clear()
    gc.collect()
    assert [one() for one in seen] == [None, None]


def test_captured_graph_out_of_memory_is_no_capture_error(driver: Driver) -> None:
    def work() -> None:
        raise torch.OutOfMemoryError

    driver.refused = 0
    with pytest.raises(torch.OutOfMemoryError):
        captured_graph(work, CPU)


def test_decoder_failed_capture_continues_without_cuda_graphs(driver: Driver) -> None:
    target, asked = FastTarget(tiny_model()), prompts(3, seed=3)
    for name in ("medusa", "eagle3"):
        drafter = build(name, target, 0.3)
        wanted = [r.tokens for r in Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=20).run(asked, 2).results]
        driver.begun, made = 0, Graph.made
        decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=20, controls=Controls(read_every=1))
        decoder.captures = True
        with pytest.warns(UserWarning, match="decode steps run without CUDA graphs: .*failed due to a previous error"):
            found = decoder.run(asked, 2)
        assert [r.tokens for r in found.results] == wanted and found.costs.captures == 0
        for slots in (2, 1, 3):
            assert [r.tokens for r in decoder.run(asked, slots).results] == wanted
        assert Graph.made == made + 2, (
            "one for the failed capture, one after it; none is tried again, in other sessions neither"
        )


def test_verification_seconds_failed_capture_times_calls(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_size, "capturable", lambda *_: True)
    target = tiny_target()
    costs = tree_size.verification_seconds(target, build("medusa", target), [1, 5], repeats=2)
    assert costs.keys() == {1, 5} and min(costs.values()) > 0.0


def test_why_waiting_finds_synchronising_work_without_capture(cpu_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]
    own = {"get_sync_debug_mode": lambda: modes[-1], "set_sync_debug_mode": modes.append}
    monkeypatch.setattr(graph_runner, "cuda", SimpleNamespace(**(vars(graph_runner.cuda) | own)))

    def waits() -> None:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert why_waiting(waits) == "called a synchronizing CUDA operation" and modes == [0, "error", 0]
    assert why_waiting(lambda: None) is None and modes[-1] == 0


def test_why_not_captured_detects_host_counter_in_target(cpu_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host counts its calls; a replay has the count of the capture."""
    target, calls = tiny_target(), [0]
    assert why_not_captured(target) is None
    own = target.head

    def counting(hidden_H: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return own(hidden_H) * calls[0]

    monkeypatch.setattr(target, "head", counting)
    assert why_not_captured(target) == "a replayed graph gives other logits than a call"


def test_target_capture_reason_is_cached_and_not_tried_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from drafttrain.targets import hf

    target, tried = tiny_target(), list[Any]()
    monkeypatch.setattr(hf, "why_not_captured", lambda target: tried.append(target) or "it waits")
    assert target.captured and target.capture_reason is None and not tried, "without a GPU nothing is tried"
    monkeypatch.setattr(type(target), "device", torch.device("cuda"))
    assert [target.capture_reason, target.capture_reason, target.captured] == ["it waits", "it waits", False] and len(
        tried
    ) == 1
