"""The node count that pays: from given costs, and from costs taken here."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from drafttrain.decoding import tree_size as treesize
from drafttrain.drafters import families
from drafttrain.ops import library
from drafttrain.targets.fast import FastTarget
from tests.contract.test_families import NAMES, build
from tests.helpers import FEW, tiny_model, tiny_target
from tests.recorder import Graph, cpu_graphs
from tests.tiny import built

__all__ = ["cpu_graphs"]


def ranks(hit: float, samples: int = 4000) -> list[torch.Tensor]:
    """Texts in which the true token is the first choice with chance `hit`, the second with half of the rest, and so on."""
    torch.manual_seed(0)
    return list(torch.distributions.Geometric(hit).sample((samples, 3)).long().clamp_max(10).split(500))


@pytest.mark.parametrize(("a_node", "nodes"), [(0.0, 255), (0.0005, 96), (0.02, 16), (0.3, 2)])
def test_dear_nodes_make_small_trees(a_node: float, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(treesize, "proposal_seconds", lambda target, drafter: 0.1)
    monkeypatch.setattr(treesize, "verification_seconds", lambda target, drafter, sizes: {n: 1.0 + a_node * n for n in sizes})
    found = treesize.best_nodes(None, None, ranks(0.6))  # type: ignore[arg-type]
    assert nodes / 2 <= found <= 2 * nodes


def test_large_trees_are_timed_only_where_the_largest_of_the_others_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def costs(target: None, drafter: None, sizes: list[int], a_node: float) -> dict[int, float]:
        timed.append(max(sizes))
        return {n: 1.0 + a_node * n for n in sizes}

    monkeypatch.setattr(treesize, "proposal_seconds", lambda target, drafter: 0.1)
    for a_node in (0.02, 0.0):
        monkeypatch.setattr(treesize, "verification_seconds", partial(costs, a_node=a_node))
        treesize.best_nodes(None, None, ranks(0.6, 500))  # type: ignore[arg-type]
    assert timed == [65, 65, 256]


@pytest.mark.sampled(name=FEW)
@pytest.mark.sampled_slow
@pytest.mark.parametrize("name", sorted(families()))
def test_costs_are_taken_of_every_family(name: str) -> None:
    target = tiny_target()
    drafter = built(name, target).eval()
    costs = treesize.verification_seconds(target, drafter, [1, 9], repeats=2)
    assert set(costs) == {1, 9} and min(costs.values()) > 0.0
    assert treesize.proposal_seconds(target, drafter, repeats=2) > 0.0
    assert treesize.best_nodes(target, drafter, ranks(0.5, 500), (2, 4)) in (2, 4)


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", NAMES)
def test_costs_are_those_of_captured_steps(name: str, cpu_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_best_tree_is_chosen_by_captured_costs(cpu_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one cost for all sizes, as replays of the same operations have here, the largest tree pays."""
    monkeypatch.setattr(library, "has_product", lambda: False)
    monkeypatch.setattr(treesize, "capturable", lambda *_: True)
    target = FastTarget(tiny_model())
    assert treesize.best_nodes(target, build("medusa", target), ranks(0.5, 500), (2, 4, 8)) == 8 and Graph.made == 4
