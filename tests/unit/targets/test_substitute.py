"""Weights that replace a model's own for decoding stay where they are: captured steps refer to their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafttrain.model.joint import MergedForward, QuantisedForward
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_model


def memory_of(target: HFTarget) -> list[int]:
    found = []
    for layer in target.model.modules():
        held = layer.__dict__.get("forward")
        if isinstance(held, QuantisedForward):
            found += [held.product.code.data_ptr(), held.product.scale.data_ptr()]
        elif isinstance(held, MergedForward):
            found.append(held.copied.weight.data_ptr())
    return found


def state_of(target: HFTarget) -> torch.Tensor:
    from drafttrain.model.target import FINAL, Taps

    token_1T = torch.arange(5)[None]
    with torch.no_grad():
        return target(token_1T, None, None, token_1T, Taps(final=True), token_1T[:, :0]).hidden[FINAL]


@pytest.mark.parametrize("way", [8, 4, "adapter"])
def test_substituted_weights_follow_parameters_at_same_address(way: Any) -> None:
    target = HFTarget(tiny_model(), frozen=False).eval()
    if way == "adapter":
        target.adapt(2, 4)
    else:
        target.bits = way
    with torch.inference_mode():  # a measurement may open the first cache
        target.new_cache(1, 8)
    before, first = memory_of(target), state_of(target)
    assert before
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    target.new_cache(1, 8)
    changed = state_of(target)
    assert memory_of(target) == before and not torch.equal(first, changed)
    target.train().eval()
    assert not memory_of(target), "training takes the parameters"
    target.new_cache(1, 8)
    torch.testing.assert_close(state_of(target), changed, atol=0.0, rtol=0.0)
