"""JetSpec's causal blocks, weights and trees."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.drafters.jetspec import JetSpec, JetSpecOptions
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.unit.drafters.test_dflash import slot_states
from tests.unit.drafters.test_dspark import proposed, read
from tests.unit.drafters.test_dynamic_tree import likeliest


def built(target: HFTarget, **options: Any) -> JetSpec:
    torch.manual_seed(1)
    drafter = JetSpec(
        JetSpecOptions(**{"block_size": 5, "layers": 2, "target_layer_ids": [0, 2], "nodes": 7} | options), target
    )
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("causal", [True, False])
def test_jetspec_slots_see_later_slots_only_if_not_causal(causal: bool) -> None:
    """A block of two slots has the first slots of a longer block, in training; drafts of fewer slots are the first drafts."""
    target = tiny_target()
    long = built(target, causal=causal)
    short = built(target, causal=causal, block_size=3)
    short.load_state_dict(long.state_dict())
    batch = read(target, long)  # type: ignore[arg-type]
    states = [drafter.states(batch, batch.anchors()) for drafter in (long, short)]
    same = torch.allclose(states[0][:, :, :3], states[1], atol=1e-5)
    assert same == causal
    trees = [proposed(built(target, causal=causal, block_size=size, tree="chain"), batch, Sampling()) for size in (5, 3)]  # type: ignore[arg-type]
    assert torch.equal(trees[0].token_BN[:, :3], trees[1].token_BN) or not causal


def test_jetspec_prediction_weights_are_uniform() -> None:
    target = tiny_target()
    drafter = built(target)
    assert drafter.decay == [0.25] * 4
    assert {p.weight for p in drafter.predict(read(target, drafter))} == {0.25}  # type: ignore[arg-type]


def test_jetspec_tree_holds_likeliest_paths_of_slots() -> None:
    """All paths of the product of the slots' distributions, the likeliest first; slots from the definition."""
    target, nodes = tiny_target(), 7
    drafter = built(target, nodes=nodes, block_size=4)
    batch = read(target, drafter)  # type: ignore[arg-type]
    tree = proposed(drafter, batch, Sampling())  # type: ignore[arg-type]
    states = slot_states(drafter, target, batch, 0, batch.token_BT.shape[1] - 2, causal=True)  # type: ignore[arg-type]
    log_KV = target.head(states[1:]).log_softmax(-1)
    scores = {path: sum(float(log_KV[k, t]) for k, t in enumerate(path)) for path in paths_of(log_KV, nodes)}
    wanted = likeliest(scores, nodes)
    tokens, parents = tree.token_BN[0].tolist(), tree.parent_BN[0].tolist()
    found = []
    for node in range(1, len(tokens)):
        path, at = [tokens[node]], parents[node]
        while at > 0:
            path, at = [tokens[at], *path], parents[at]
        found.append(tuple(path))
    assert sorted(found) == sorted(wanted)
    assert len({len(path) for path in wanted}) > 1, "paths of several lengths"


def paths_of(log_KV: torch.Tensor, ranks: int) -> list[tuple[int, ...]]:
    """All paths of each slot's likeliest tokens; a rank beyond the number of nodes is in no tree of so many."""
    choices = log_KV.topk(ranks, -1).indices.tolist()
    return [path for depth in range(1, len(choices) + 1) for path in product(*choices[:depth])]
