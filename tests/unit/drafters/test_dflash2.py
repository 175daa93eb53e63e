"""DFlash2's convolutions and selector against loops, and against DFlash where they do nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.drafters.dflash import DFlash, DFlashOptions
from drafttrain.drafters.dflash2 import FAMILY, DFlash2, DFlash2Options
from drafttrain.model.recurrent_state import Convolved
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.unit.drafters.test_dspark import proposed, read

SMALL: dict[str, Any] = {"block_size": 4, "layers": 2, "target_layer_ids": [0, 2], "mask_token": 9}
OWN: dict[str, Any] = {"rank": 8, "candidates": 6, "group": 8}


def fresh(target: HFTarget, **options: Any) -> DFlash2:
    torch.manual_seed(1)
    return DFlash2(DFlash2Options(**SMALL | OWN | options), target).eval().requires_grad_(False)


def built(target: HFTarget, **options: Any) -> DFlash2:
    drafter = fresh(target, **options)
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter


def test_convolved_layer_equals_loop_over_neighbour_slots() -> None:
    torch.manual_seed(0)
    convolved, x_BASH = Convolved(32, 8).requires_grad_(False), torch.randn(2, 3, 5, 32)
    assert torch.equal(convolved(x_BASH, torch.sin), torch.sin(x_BASH)), "nothing at the start"
    for parameter in convolved.parameters():
        parameter.add_(torch.randn_like(parameter))
    found = convolved(x_BASH, torch.sin)

    def mixed(x_SH: torch.Tensor, told_SH: torch.Tensor, side: int) -> torch.Tensor:
        out_SH = torch.zeros_like(x_SH)
        for slot in range(5):
            kernels = (convolved.kernel_projection.weight @ told_SH[slot]).view(2, 2, 4)
            for channel in range(32):
                for tap in (0, 1) if slot else (0,):
                    kernel = convolved.base_kernel[side, tap, channel] + kernels[side, tap, channel // 8]
                    out_SH[slot, channel] += kernel * x_SH[slot - tap, channel]
        return out_SH

    for row in range(2):
        for block in range(3):
            x_SH = x_BASH[row, block]
            wanted = mixed(torch.sin(mixed(x_SH, x_SH, 0)), x_SH, 1)
            torch.testing.assert_close(found[row, block], wanted, rtol=1e-4, atol=1e-4)


def test_dflash2_fresh_drafter_equals_dflash() -> None:
    """States of all blocks, and the drafts."""
    target = tiny_target()
    drafter, plain = fresh(target), DFlash(DFlashOptions(**SMALL), target).eval().requires_grad_(False)
    own = drafter.state_dict()
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    batch = read(target, drafter)  # type: ignore[arg-type]
    ours, theirs = (proposed(d, batch, Sampling()) for d in (drafter, plain))  # type: ignore[arg-type]
    assert torch.equal(ours.token_BN, theirs.token_BN)
    counted = [p for p in drafter.predict(batch) if p.counted]
    for a, b in zip(counted, plain.predict(batch), strict=True):
        torch.testing.assert_close(a.hidden_MH[:, :32], b.hidden_MH)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_dflash2_drafts_follow_selector_scores_after_previous_token(temperature: float) -> None:
    target = tiny_target()
    drafter, sampling = built(target), Sampling(temperature, seed=3)
    batch = read(target, drafter)  # type: ignore[arg-type]
    tree = proposed(drafter, batch, sampling)  # type: ignore[arg-type]
    tokens, heads = tree.token_BN[0].tolist(), dict(drafter.named_parameters())
    for k, state_H in enumerate(slots_of(drafter, batch)):
        best, token = target.head(state_H).topk(6)
        joint_R = heads["candidate_selector.predecessor_codebook.weight"][tokens[k]] * (
            heads["candidate_selector.hidden_projection.weight"] @ state_H
        )
        scores = best + heads["candidate_selector.successor_codebook.weight"][token] @ joint_R
        if tree.q_BNV is None:
            assert tokens[k + 1] == int(token[scores.argmax()])
        else:
            q_V = torch.zeros(64).scatter(0, token, (scores / temperature).softmax(0))
            torch.testing.assert_close(tree.q_BNV[0, k], q_V, rtol=1e-4, atol=1e-5)
            assert int((tree.q_BNV[0, k] > 0).sum()) <= 6


def slots_of(drafter: DFlash2, batch: Any) -> torch.Tensor:
    """[K, H] the states behind all but the last token, from training, one token further on."""
    longer = replace(
        batch,
        **{
            name: torch.cat([getattr(batch, name), fill], 1)
            for name, fill in (
                ("token_BT", torch.zeros(1, 1, dtype=torch.long)),
                ("position_BT", batch.position_BT[:, -1:] + 1),
                ("document_BT", torch.zeros(1, 1, dtype=torch.long)),
                ("mask_BT", torch.ones(1, 1, dtype=torch.bool)),
            )
        },
        hidden={k: torch.cat([h, h[:, :1]], 1) for k, h in batch.hidden.items()},
    )
    anchors = longer.anchors()
    return drafter.states(longer, anchors)[0, anchors.source_BA[0].tolist().index(batch.token_BT.shape[1] - 2)][1:]


def test_dflash2_invalid_selector_options_are_refused(subtests: pytest.Subtests) -> None:
    target = tiny_target()
    for wrong in ({"rank": 0}, {"candidates": 1}, {"candidates": 65}, {"group": 5}, {"group": 0}):
        with subtests.test(wrong=wrong), pytest.raises(UserError, match=r"drafter\."):
            FAMILY.build(DFlash2Options(**SMALL | OWN | wrong), target)
