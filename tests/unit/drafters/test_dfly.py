"""DFly's contexts, corrections, loss and drafts against their definition, slot by slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling, distribution
from drafttrain.drafters.dfly import FAMILY, DFly, DFlyOptions
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.unit.drafters.test_dflash import naive, packed, slot_states
from tests.unit.drafters.test_dspark import proposed, read

SMALL: dict[str, Any] = {
    "block_size": 4,
    "layers": 2,
    "target_layer_ids": [0, 1, 2],
    "mask_token": 9,
    "hidden_correction_size": 12,
}


def built(target: HFTarget, noise: float = 0.3, **options: Any) -> DFly:
    torch.manual_seed(1)
    drafter = DFly(DFlyOptions(**SMALL | options), target)
    for parameter in drafter.parameters():
        parameter.data.add_(noise * torch.randn_like(parameter))
    return drafter


def own_contexts(drafter: DFly, tapped: list[Tensor]) -> list[Tensor]:
    found = []
    for logits_T in drafter.layer_fusion.weight:
        share_T = logits_T.exp() / logits_T.exp().sum()
        mixed = sum(share * h for share, h in zip(share_T, tapped, strict=True))
        found.append(drafter.context_norm(drafter.context_proj(torch.cat(tapped, -1)) + mixed))
    return found


def corrected(drafter: DFly, target: HFTarget, state_H: Tensor, before: int) -> Tensor:
    """By plain matrices."""
    w = dict(drafter.hidden_correction.named_parameters())
    eps = drafter.layer_shape.norm_eps
    parts = [(state_H, "hidden_norm"), (target.embed(torch.tensor(before)), "embed_norm")]
    z = torch.cat([F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], eps) for x, name in parts])
    return state_H + w["down_proj.weight"] @ (F.silu(w["gate_proj.weight"] @ z) * (w["up_proj.weight"] @ z))


def states(drafter: DFly, target: HFTarget, batch: Any) -> Tensor:
    return slot_states(drafter, target, batch, 0, batch.token_BT.shape[1] - 2, contexts=own_contexts)


@pytest.mark.sampled
@pytest.mark.parametrize("slots", ["shifted", "in_place"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_dfly_drafts_follow_logits_corrected_by_previous_token(slots: str, temperature: float) -> None:
    target = tiny_target()
    drafter = built(target, slots=slots).eval().requires_grad_(False)
    batch, sampling = read(target, drafter), Sampling(temperature, top_k=9, seed=5)  # type: ignore[arg-type]
    tree, state_SH = proposed(drafter, batch, sampling), states(drafter, target, batch)  # type: ignore[arg-type]
    tokens = tree.token_BN[0].tolist()
    assert len(tokens) == drafter.draft_length + 1
    for k in range(drafter.draft_length):
        logits_V = target.head(corrected(drafter, target, state_SH[drafter.shape.first + k], tokens[k]))
        if tree.q_BNV is None:
            assert tokens[k + 1] == int(logits_V.argmax())
        else:
            torch.testing.assert_close(tree.q_BNV[0, k], distribution(logits_V, sampling), rtol=1e-4, atol=1e-5)


def test_dfly_static_tree_node_is_chosen_after_its_parent_token() -> None:
    target = tiny_target()
    paths = [[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 1, 0]]
    drafter = built(target, tree="static", paths=paths).eval().requires_grad_(False)
    batch = read(target, drafter)  # type: ignore[arg-type]
    tree, state_SH = proposed(drafter, batch, Sampling()), states(drafter, target, batch)  # type: ignore[arg-type]
    tokens, parents = tree.token_BN[0].tolist(), tree.parent_BN[0].tolist()
    depths = [0]
    for node in range(1, len(tokens)):
        depths.append(depths[parents[node]] + 1)
        state_H = state_SH[drafter.shape.first + depths[parents[node]]]
        logits_V = target.head(corrected(drafter, target, state_H, tokens[parents[node]]))
        assert tokens[node] in logits_V.topk(2).indices.tolist()
    assert sorted(depths[1:]) == sorted(map(len, paths))


@pytest.mark.sampled
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_dfly_loss_and_gradients_equal_reference(loss: str, weights: str) -> None:
    """The token before a slot is the text's."""
    target = tiny_target()
    options = DFlyOptions(**SMALL, weights=weights)
    drafter = built(target, weights=weights).train()
    batch = packed(target, drafter)  # type: ignore[arg-type]

    def read_by_head(state_H: Tensor, before: int) -> Tensor:
        return corrected(drafter, target, state_H, before)

    wanted = naive(drafter, target, batch, options, loss, own_contexts, read_by_head)
    gradients = torch.autograd.grad(wanted, list(drafter.parameters()))
    found = Objective(drafter, target, LossOptions(loss, chunk=16))(batch)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(found, list(drafter.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)
        assert float(theirs.abs().sum()) > 0


def test_dfly_fresh_hidden_correction_is_identity() -> None:
    target = tiny_target()
    drafter = built(target, noise=0.0).eval().requires_grad_(False)
    state_3H, before_3 = torch.randn(3, 32), torch.tensor([4, 9, 17])
    assert torch.equal(drafter.head_input(state_3H, before_3), state_3H)
    assert drafter.hidden_correction.gate_proj.weight.std() > 0.01


def test_dfly_hidden_correction_size_is_resolved_and_zero_is_refused() -> None:
    target = tiny_target()
    assert built(target, hidden_correction_size=None).resolved_options()["hidden_correction_size"] == 32
    assert built(target).hidden_correction.up_proj.weight.shape == (12, 64)
    with pytest.raises(UserError, match=r"drafter\.hidden_correction_size is 0"):
        FAMILY.build(DFlyOptions(hidden_correction_size=0), target)
