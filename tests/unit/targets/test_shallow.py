"""A target's first blocks as a target, and its norm: the same weights, the same numbers."""

from __future__ import annotations

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.estimate import Outline
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.helpers import ARCHITECTURES, quantised_target, tiny_model, tiny_target

TEXT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
AT = torch.arange(8).expand(2, -1)
FEW = ("mistral-sliding", "gpt2", "opt")  # a window, and norms that have other names


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_target_norm_of_last_block_output_equals_final_hidden_state(name: str) -> None:
    target = tiny_target(name)
    with torch.inference_mode():
        hidden = target(TEXT, None, None, AT, Taps((3,), final=True)).hidden
        torch.testing.assert_close(target.norm(hidden[3]), hidden[FINAL])


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shallow_target_hidden_states_and_logits_equal_whole_target(name: str) -> None:
    target = tiny_target(name)
    view = target.shallow(2)
    with torch.inference_mode():
        passed = target(TEXT, None, None, AT, Taps((1,))).hidden[1]
        own = view(TEXT, None, None, AT, Taps((1,), final=True))
        torch.testing.assert_close(own.hidden[1], passed)
        torch.testing.assert_close(own.logits_BRV, target.head(target.norm(passed)))


@pytest.mark.parametrize("fast", [False, True])
def test_shallow_target_with_kv_cache_shares_weights_and_equals_whole(fast: bool) -> None:
    target = FastTarget(tiny_model()) if fast else HFTarget(tiny_model())
    view = target.shallow(3)
    assert view.shape.blocks == 3 and view.new_cache(1, 8).layers == 3
    held = {p.untyped_storage().data_ptr() for p in target.model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in view.model.parameters()} <= held
    kv, empty = view.new_cache(2, 16), TEXT[:, :0]
    with torch.inference_mode():
        view(TEXT[:, :5], kv, None, AT[:, :5], Taps(), empty)
        kv.keep(AT[:, :5], torch.tensor([5, 5]))
        found = view(TEXT[:, 5:], kv, None, AT[:, 5:], Taps((2,)))
        wanted = target(TEXT, None, None, AT, Taps((2,))).hidden[2][:, 5:]
        close = {"rtol": 1e-4, "atol": 1e-4}  # three rows behind a cache are summed otherwise than eight in one pass
        torch.testing.assert_close(found.hidden[2], wanted, **close)
        torch.testing.assert_close(found.logits_BRV, target.head(target.norm(wanted)), **close)
        assert target(TEXT, None, None, AT, Taps()).logits_BRV is not None and target.shape.blocks == 4


def test_shallow_target_bad_block_count_or_quantised_is_refused() -> None:
    for blocks in (0, 4):
        with pytest.raises(UserError, match=r"choose 1\.\.3"):
            tiny_target().shallow(blocks)
    for target in (quantised_target("int8"), quantised_target("fp8", FastTarget)):
        with pytest.raises(UserError, match="first blocks, whose weights"):
            target.shallow(2)


def test_shallow_outline_on_meta_device_has_block_count() -> None:
    with torch.device("meta"):
        assert Outline(tiny_model_on_meta()).shallow(1).shape.blocks == 1


def tiny_model_on_meta() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(ARCHITECTURES["llama"])
