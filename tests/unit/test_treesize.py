"""The node count that pays: from given costs, and from costs taken here."""

from __future__ import annotations

import pytest
import torch

from drafttrain import treesize
from drafttrain.drafters import families
from tests.helpers import tiny_target


def ranks(hit: float, samples: int = 4000) -> list[torch.Tensor]:
    """Texts in which the true token is the first choice with chance `hit`, the second with half of the rest, and so on."""
    torch.manual_seed(0)
    return list(torch.distributions.Geometric(hit).sample((samples, 3)).long().clamp_max(10).split(500))


@pytest.mark.parametrize(("a_node", "nodes"), [(0.0, 64), (0.02, 16), (0.3, 2)])
def test_dear_nodes_make_small_trees(a_node: float, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(treesize, "proposal_seconds", lambda target, drafter: 0.1)
    monkeypatch.setattr(treesize, "verification_seconds", lambda target, drafter, sizes: {n: 1.0 + a_node * n for n in sizes})
    found = treesize.best_nodes(None, None, ranks(0.6))  # type: ignore[arg-type]
    assert nodes / 2 <= found <= 2 * nodes


@pytest.mark.parametrize("name", sorted(families()))
def test_costs_are_taken_of_every_family(name: str) -> None:
    target, family = tiny_target(), families()[name]
    drafter = family.build(family.options(), target).eval()
    costs = treesize.verification_seconds(target, drafter, [1, 9], repeats=2)
    assert set(costs) == {1, 9} and min(costs.values()) > 0.0
    assert treesize.proposal_seconds(target, drafter, repeats=2) > 0.0
    assert treesize.best_nodes(target, drafter, ranks(0.5, 500), (2, 4)) in (2, 4)
