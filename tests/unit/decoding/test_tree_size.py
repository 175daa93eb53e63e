"""The node count that pays: from given costs, and from costs taken here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch

from drafttrain.core.tree import tuned_paths
from drafttrain.decoding import tree_size as treesize
from drafttrain.drafters import families
from drafttrain.ops import library
from drafttrain.targets.fast import FastTarget
from tests.contract.test_families import NAMES, build
from tests.helpers import tiny_model, tiny_target
from tests.recorder import Graph, cpu_graphs
from tests.tiny import built

__all__ = ["cpu_graphs"]
TIMED = ("medusa", "draft_model")  # what is timed are two calls, whichever the family


def ranks(hit: float, samples: int = 1000) -> list[torch.Tensor]:
    """Texts in which the true token is the first choice with chance `hit`, the second with half of the rest, and so on."""
    torch.manual_seed(0)
    return list(torch.distributions.Geometric(hit).sample((samples, 3)).long().clamp_max(10).split(500))


TEXTS = ranks(0.6)
PATHS = cache(partial(tuned_paths, TEXTS))  # they depend on no cost, and take most of the time


@pytest.fixture
def best_nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], tuple[int, list[int]]]:
    """Of TEXTS, where a node costs so much of a verification without nodes, and a proposal a tenth: (nodes, sizes timed)."""

    def found(a_node: float) -> tuple[int, list[int]]:
        timed: list[int] = []

        def costs(target: None, drafter: None, sizes: list[int]) -> dict[int, float]:
            timed.append(max(sizes))
            return {n: 1.0 + a_node * n for n in sizes}

        monkeypatch.setattr(treesize, "verification_seconds", costs)
        return treesize.best_nodes(None, None, TEXTS), timed  # type: ignore[arg-type]

    monkeypatch.setattr(treesize, "tuned_paths", lambda texts, nodes: PATHS(nodes))
    monkeypatch.setattr(treesize, "proposal_seconds", lambda target, drafter: 0.1)
    return found


def test_best_nodes_falls_as_node_cost_rises(
    best_nodes: Callable[[float], tuple[int, list[int]]], subtests: pytest.Subtests
) -> None:
    for a_node, nodes in ((0.0, 255), (0.0005, 96), (0.02, 16), (0.3, 2)):
        with subtests.test(a_node=a_node):
            assert nodes / 2 <= best_nodes(a_node)[0] <= 2 * nodes


def test_best_nodes_times_large_trees_only_if_largest_small_tree_is_best(
    best_nodes: Callable[[float], tuple[int, list[int]]],
) -> None:
    assert best_nodes(0.02)[1] == [65] and best_nodes(0.0)[1] == [65, 256]


@pytest.mark.sampled(name=TIMED)
@pytest.mark.parametrize("name", sorted(families()))
def test_tree_size_costs_are_measured_for_every_family(name: str) -> None:
    target = tiny_target()
    drafter = built(name, target).eval()
    costs = treesize.verification_seconds(target, drafter, [1, 9], repeats=2)
    assert set(costs) == {1, 9} and min(costs.values()) > 0.0
    assert treesize.proposal_seconds(target, drafter, repeats=2) > 0.0
    assert treesize.best_nodes(target, drafter, ranks(0.5, 500), (2, 4)) in (2, 4)


def test_proposals_are_timed_between_passes_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a row they would find all that they read in a CPU's caches."""
    target, order, call = tiny_target(), list[str](), treesize._call_seconds
    drafter, forward = built("medusa", target).eval(), target.forward
    monkeypatch.setattr(treesize, "_call_seconds", lambda work: order.append("proposal") or call(work))
    monkeypatch.setattr(target, "forward", lambda *given: order.append("pass") or forward(*given))
    treesize.proposal_seconds(target, drafter, repeats=2)
    assert order == ["pass", *["proposal", "pass"] * 3]


@pytest.mark.sampled(name=TIMED)
@pytest.mark.parametrize("name", NAMES)
def test_tree_size_costs_time_captured_replays_only(name: str, cpu_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps will be captured: replays alone are timed, by the device's events, and the host launches nothing else."""
    monkeypatch.setattr(library, "has_product", lambda: False)
    monkeypatch.setattr(treesize, "capturable", lambda target, drafter: drafter.captured)
    monkeypatch.setattr(treesize, "_call_seconds", lambda work: pytest.fail("a call was timed"))
    target = FastTarget(tiny_model())
    drafter = build(name, target)
    if not drafter.captured:
        pytest.skip("says itself that no graph can hold its steps")
    passes, forward = [], target.forward
    monkeypatch.setattr(target, "forward", lambda *given: passes.append(given[0].shape[1]) or forward(*given))
    costs = treesize.verification_seconds(target, drafter, [1, 9], repeats=3, batch=2)
    assert passes == [treesize.CONTEXT, *[1] * 3, *[9] * 3], "two trials and a capture of each size"
    assert Graph.made == 2 and all(seconds >= 0.001 for seconds in costs.values())
    replayed = Graph.replayed
    seconds = treesize.proposal_seconds(target, drafter, repeats=3, batch=2, depth=2)
    assert Graph.made == 3 and Graph.replayed - replayed == 4 * round(1000 * seconds)


def test_best_nodes_with_equal_captured_costs_takes_largest_tree(cpu_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one cost for all sizes, as replays of the same operations have here, the largest tree pays."""
    monkeypatch.setattr(library, "has_product", lambda: False)
    monkeypatch.setattr(treesize, "capturable", lambda *_: True)
    target = FastTarget(tiny_model())
    assert treesize.best_nodes(target, build("medusa", target), ranks(0.5, 500), (2, 4, 8)) == 8 and Graph.made == 4
