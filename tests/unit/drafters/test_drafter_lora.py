"""Which linear maps of a drafter get matrices, and how a checkpoint's matrices are merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.drafters.checkpoint import read_meta
from drafttrain.drafters.common.drafter_lora import adapted_maps, add_matrices, added, merged, name_in_checkpoint
from drafttrain.model.batch import TrainBatch
from drafttrain.model.joint import Joint
from drafttrain.model.lora import LoraOptions
from drafttrain.model.target import Taps
from drafttrain.targets.fast import FastTarget
from tests.exports import checkpoint
from tests.helpers import tiny_model, tiny_target
from tests.tiny import build

BLOCKS = [f"heads.{head}.blocks.0.linear" for head in range(3)]
OUTPUTS = [f"heads.{head}.output" for head in range(3)]


def test_adapted_maps_by_lora_targets_include_heads_only_if_named(subtests: pytest.Subtests) -> None:
    drafter = build("medusa", tiny_target())
    named: tuple[tuple[list[str], list[str]], ...] = (
        ([], BLOCKS),
        (["output"], OUTPUTS),
        (["linear", "output"], sorted(BLOCKS + OUTPUTS)),
        (["heads.1.output"], OUTPUTS[1:2]),
        (["0.linear"], BLOCKS),
    )
    for targets, expected in named:
        with subtests.test(targets=targets):
            found = adapted_maps(drafter, LoraOptions(2, targets=targets), 64)
            assert sorted(found) == expected
            assert added(found, 2) == sum(2 * (m.in_features + m.out_features) for m in found.values())


def test_adapted_maps_leave_out_draft_vocabulary_head_by_default() -> None:
    drafter = build("eagle3", tiny_target(), draft_vocab=20)
    drafter.prepare(lambda: torch.arange(64))
    assert "lm_head" not in adapted_maps(drafter, LoraOptions(2), 64)
    cascade: Any = build("cascade", tiny_target(), middle={"family": "medusa"})
    assert {name.rpartition(".")[2] for name in adapted_maps(cascade, LoraOptions(2), 64)} == {"linear"}


def test_adapted_maps_invalid_lora_targets_are_refused(subtests: pytest.Subtests) -> None:
    target = tiny_target()
    wrong: tuple[tuple[str, dict[str, Any], list[str], str], ...] = (
        ("medusa", {}, ["linaer"], "train.lora.targets has linaer; the drafter's trained linear maps are linear, output"),
        ("peagle", {}, ["q_proj", "embed_tokens"], "targets has embed_tokens; the drafter's trained linear maps are down_proj"),
        ("prompt_lookup", {}, [], "finds no linear map to adapt; the drafter's trained linear maps are none"),
        ("draft_model", {"lora_rank": 2}, [], "this one has some; leave train.lora out, or set drafter.lora_rank=0"),
    )
    for name, options, targets, says in wrong:
        with subtests.test(name=name), pytest.raises(UserError, match=says):
            adapted_maps(build(name, target, **options), LoraOptions(2, targets=targets), 64)


def test_adapted_maps_tied_lm_head_is_refused_if_named() -> None:
    drafter: Any = build("draft_model", tiny_target())
    model = drafter.lm.model
    model.lm_head.weight = model.model.embed_tokens.weight
    assert "lm.model.lm_head" not in adapted_maps(drafter, LoraOptions(2), 64)
    with pytest.raises(UserError, match=r"has lm.model.lm_head, whose weight is that of lm.model.model.embed_tokens too"):
        adapted_maps(drafter, LoraOptions(2, targets=["lm_head"]), 64)


def test_add_matrices_reaches_joined_weights_and_fast_runner_blocks() -> None:
    """Joined weights, and the blocks of a fast runner, which were made before."""
    drafter: Any = build("mlp_speculator", tiny_target(), tie_weights=True)
    own, joint = drafter.proj[0], Joint([drafter.proj[0]])
    add_matrices(drafter, LoraOptions(2, 8.0, ["proj"]), 64)
    assert drafter.proj[0] is own and type(own).__module__.startswith("peft")
    own.lora_B["default"].weight.data.fill_(0.1)
    joint.join(share=False, packed=False)
    state = {name_in_checkpoint(name): x for name, x in drafter.state_dict().items()}
    whole = merged(state, vars(LoraOptions(2, 8.0)))
    assert torch.allclose(joint.weight, whole["proj.0.weight"]) and not torch.equal(joint.weight, own.base_layer.weight)

    target = FastTarget(tiny_model())
    model: Any = build("draft_model", target)
    token_BT = torch.tensor([[3, 9, 27, 5]])
    batch = TrainBatch(token_BT, torch.arange(4)[None], torch.zeros_like(token_BT), torch.ones_like(token_BT, dtype=torch.bool))

    def final() -> torch.Tensor:
        lm, empty = model.lm, token_BT[:, :0]
        return next(iter(lm(token_BT, None, batch.sees(), batch.position_BT, Taps(final=True), empty).hidden.values())).detach()

    before = final()
    add_matrices(model.train(), LoraOptions(2, 8.0), 64)
    assert torch.equal(final(), before)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.fill_(0.1)
    assert not torch.allclose(final(), before, atol=1e-3)


def test_merged_lora_is_computed_in_float32_and_mismatch_is_refused() -> None:
    a_RI, b_OR, weight_OI = torch.randn(2, 3), torch.randn(4, 2), torch.randn(4, 3)
    state = {"m.weight": weight_OI.bfloat16(), "m.bias": torch.ones(4)}
    matrices = {"lora.m.lora_A.weight": a_RI, "lora.m.lora_B.weight": b_OR}
    plain = {"rank": 2, "alpha": 6.0, "targets": []}
    whole = merged(state | matrices, plain)
    assert whole.keys() == state.keys() and whole["m.bias"] is state["m.bias"]
    assert torch.equal(whole["m.weight"], weight_OI.bfloat16().float() + 3.0 * (b_OR @ a_RI))
    assert all(torch.equal(merged(state, spec)["m.weight"], state["m.weight"]) for spec in (None, plain))
    for harm in (
        {"lora.m.lora_B.weight": b_OR[:3]},
        {"lora.m.lora_B.weight": torch.randn(4, 5)},
        {"m.weight": torch.ones(4, 9)},
    ):
        with pytest.raises(UserError, match=r"the checkpoint's LoRA does not fit m.weight"):
            merged(state | matrices | harm, plain)
    lone = copy.copy(matrices)
    del lone["lora.m.lora_B.weight"]
    with pytest.raises(UserError, match=r"does not fit m.weight"):
        merged(state | lone, plain)


def test_read_meta_unknown_lora_setting_is_refused(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, "medusa", lora=LoraOptions(2))
    file = directory / "drafter.json"
    content = json.loads(file.read_text())
    assert content["lora"] == {"rank": 2, "alpha": 16.0, "targets": []}
    content = {key: value for key, value in content.items() if key != "checksum"} | {"lora": {"rank": 2, "dora": True}}
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"expected a drafter's description, got something else .*dora"):
        read_meta(directory)
