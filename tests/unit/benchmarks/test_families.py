"""The comparison of families counts a training step's operations whatever way its loss takes gradients."""

from __future__ import annotations

import pytest
import torch

from benchmarks.families import operations
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.objective.losses import LossOptions, Objective
from tests.helpers import tiny_target
from tests.tiny import build


@pytest.mark.parametrize("name", ["medusa", "eagle3", "dflash"])
def test_families_operations_counter_includes_backward_flops(name: str) -> None:
    target = tiny_target()
    drafter, token_BT = build(name, target).train().requires_grad_(), torch.randint(0, 64, (2, 24))
    whole = TrainBatch(token_BT, torch.arange(24).expand(2, 24), torch.zeros_like(token_BT), token_BT > -1)
    batch = Online(target, drafter.taps).fill(whole)
    objective, counts = Objective(drafter, target, LossOptions()), []
    for backward in (False, True):
        with operations() as counter:
            total, _ = objective(batch)
            if backward:
                total.backward()
        counts.append(counter.get_total_flops())
    assert 0 < counts[0] < counts[1]
