"""JetSpec's causal blocks, weights and trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.drafters.jetspec import JetSpec, JetSpecOptions
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.unit.drafters.test_dspark import proposed, read


def built(target: HFTarget, **options: Any) -> JetSpec:
    torch.manual_seed(1)
    drafter = JetSpec(JetSpecOptions(**{"block_size": 5, "layers": 2, "taps": [0, 2], "nodes": 7} | options), target)
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("causal", [True, False])
def test_slots_see_no_later_slot(causal: bool) -> None:
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


def test_all_drafts_weigh_alike() -> None:
    target = tiny_target()
    drafter = built(target)
    assert drafter.decay == [0.25] * 4
    assert {p.weight for p in drafter.predict(read(target, drafter))} == {0.25}  # type: ignore[arg-type]


def test_it_drafts_the_likeliest_paths() -> None:
    """Of the product of the slots' probabilities."""
    target = tiny_target()
    drafter = built(target)
    batch = read(target, drafter)  # type: ignore[arg-type]
    tree = proposed(drafter, batch, Sampling())  # type: ignore[arg-type]
    assert tree.token_BN.shape[1] == 8
    chain = proposed(built(target, tree="chain"), batch, Sampling())  # type: ignore[arg-type]
    assert int(chain.token_BN[0, 1]) in tree.token_BN[0].tolist(), "the likeliest first token is in every tree"
