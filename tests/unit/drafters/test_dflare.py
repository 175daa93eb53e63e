"""DFlare's contexts, loss and drafts against their definition, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.common.block_drafter import BlockShape
from drafttrain.drafters.common.own_modules import falling, preferring
from drafttrain.drafters.dflare import DFlare, DFlareOptions
from drafttrain.model.shapes import TargetShape
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.hf import HFTarget
from tests.helpers import drafted_and_predicted, prompts, tiny_target
from tests.unit.drafters.test_dflash import naive, packed, slot_states
from tests.unit.drafters.test_dspark import proposed, read

SMALL: dict[str, Any] = {"block_size": 4, "layers": 3, "target_layer_ids": [0, 1, 2], "mask_token": 9}


def built(target: HFTarget, **options: Any) -> DFlare:
    torch.manual_seed(1)
    drafter = DFlare(DFlareOptions(**SMALL | options), target)
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter


def own_contexts(drafter: DFlare, tapped: list[Tensor]) -> list[Tensor]:
    found = []
    for logits_T in drafter.layer_fusion.weight:
        share_T = logits_T.exp() / logits_T.exp().sum()
        found.append(drafter.hidden_norm(sum(share * h for share, h in zip(share_T, tapped, strict=True))))
    return found


@pytest.mark.parametrize(("layers", "taps", "wanted"), [(7, 9, [0, 1, 2, 3, 5, 6, 7]), (3, 5, [0, 1, 3]), (4, 2, [0, 0, 1, 1])])
def test_layer_fusion_initial_weights_prefer_one_target_layer_each(layers: int, taps: int, wanted: list[int]) -> None:
    weight_LT = preferring(layers, taps)
    assert weight_LT.argmax(1).tolist() == wanted
    assert float(weight_LT.sum()) == 2.0 * layers and int((weight_LT != 0).sum()) == layers


def test_layer_fusion_falling_start_is_that_of_angelspec() -> None:
    """`models/draft/dflare.py` of Tencent/AngelSpec (d3412be): layer 1 of 3 with 4 taps reads the third most."""
    share_LT = falling(3, 4).softmax(-1)
    torch.testing.assert_close(share_LT[1], torch.tensor([0.0142, 0.1049, 0.7756, 0.1049]), atol=2e-3, rtol=0)
    assert falling(2, 4).argmax(1).tolist() == [0, 3] and falling(1, 3).argmax(1).tolist() == [0]


def test_dflare_default_options_have_published_target_layers() -> None:
    shape = BlockShape.of(DFlareOptions(), TargetShape(100, 32, 36, 2, 2, 16, 64, 512, 10000.0, 1e-6))
    assert shape.taps == (1, 5, 9, 13, 17, 21, 25, 29, 33) and shape.layers == 7


def test_dflare_state_dict_has_official_names() -> None:
    names = set(built(tiny_target()).state_dict())
    own = {"k_proj_target.weight", "v_proj_target.weight", "k_proj.weight", "v_proj.weight"}
    assert {f"layers.2.self_attn.{name}" for name in own} | {"hidden_norm.weight", "norm.weight"} <= names
    assert not any(name.startswith("fc.") for name in names)


@pytest.mark.sampled
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_dflare_loss_and_gradients_equal_reference(loss: str, weights: str) -> None:
    target = tiny_target()
    options = DFlareOptions(**SMALL, weights=weights)
    drafter = built(target, weights=weights).train()
    batch = packed(target, drafter)  # type: ignore[arg-type]
    wanted = naive(drafter, target, batch, options, loss, contexts=own_contexts)
    gradients = torch.autograd.grad(wanted, list(drafter.parameters()))
    found = Objective(drafter, target, LossOptions(loss, chunk=16))(batch)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(found, list(drafter.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)
        assert float(theirs.abs().sum()) > 0


@pytest.mark.parametrize("slots", ["shifted", "in_place"])
def test_dflare_proposal_equals_reference_block(slots: str) -> None:
    target = tiny_target()
    drafter = built(target, slots=slots).eval().requires_grad_(False)
    batch = read(target, drafter)  # type: ignore[arg-type]
    tree = proposed(drafter, batch, Sampling(0.7))  # type: ignore[arg-type]
    states = slot_states(drafter, target, batch, 0, batch.token_BT.shape[1] - 2, contexts=own_contexts)
    drafts = target.head(states).argmax(-1)[drafter.shape.first :]
    assert tree.q_BNV is None and tree.token_BN[0, 1:].tolist() == drafts.tolist()


def test_dflare_changed_context_projections_are_used_in_next_session() -> None:
    """Their joined weights are taken again."""
    target, prompt = tiny_target(), prompts(1, seed=8, longest=30)[0] + [5, 9, 2, 8, 1, 30, 12, 40, 2, 2, 7, 9]
    drafter = built(target).eval().requires_grad_(False)
    settings = ("greedy", Sampling(), frozenset[int](), 16)
    Decoder(target, drafter, *settings).run([prompt], 1)
    for layer in drafter.all_layers():
        for name in ("k_proj_target", "v_proj_target"):
            getattr(layer.self_attn, name).weight.data.normal_(std=0.3)
    drafts, predicted = drafted_and_predicted(target, drafter, prompt)
    assert predicted == drafts
