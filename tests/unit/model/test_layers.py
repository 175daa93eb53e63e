"""A drafter's own decoder layers: their shape, how their positions are rotated, and latent attention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from drafttrain.cli.config import register
from drafttrain.core.errors import UserError
from drafttrain.model.layers import AttentionShape, MultiHeadLatentAttention, rotary
from drafttrain.model.shapes import LayerOptions, TargetShape
from drafttrain.targets.structure import shape_of
from tests.export_oracles.layer import LayerDimensions, _frequencies
from tests.exports import LATENT, LINEAR, LLAMA3
from tests.helpers import drafted_and_predicted, fast_target, prompts, tiny_target
from tests.tiny import build

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}
LONGROPE |= {"long_factor": [1.0 + i for i in range(16)], "short_factor": [1.5] * 16}
SCALED = {
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, size": YARN | {"attention_factor": 1.5, "truncate": False},
    "yarn, bounds": YARN | {"beta_fast": 4.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn, one bound": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0},
    "longrope": LONGROPE,
    "longrope, factor": LONGROPE | {"factor": 4.0},
    "longrope, short": LONGROPE | {"original_max_position_embeddings": 512, "attention_factor": 1.2},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("scaling", SCALED.values(), ids=SCALED)
def test_rotary_scaling_equals_transformers(scaling: dict[str, Any]) -> None:
    rope = {"rope_theta": 500.0, **scaling}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=rope, max_position_embeddings=512)
    frequency_F, size = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=512)
    position_BN = torch.tensor([[0, 1, 7, 300]])
    cos_BND, sin_BND = rotary(position_BN, 32, 500.0, torch.float32, scaling, 512)
    plain_BND, _ = rotary(position_BN, 32, 500.0, torch.float32)
    angle_BNF = position_BN[..., None] * frequency_F
    torch.testing.assert_close(cos_BND[..., :16], size * angle_BNF.cos(), atol=1e-4, rtol=0)
    torch.testing.assert_close(sin_BND[..., 16:], size * angle_BNF.sin(), atol=1e-4, rtol=0)
    assert torch.allclose(cos_BND, plain_BND, atol=1e-2) is (scaling["rope_type"] == "dynamic")
    LayerOptions(rope_scaling=scaling, head_dim=32).shape(tiny_target().shape)
    read_F, read_size = _frequencies(LayerDimensions(64, 48, 2, 2, 32, 500.0, 1e-6, 512, scaling))  # of the exports' own check
    torch.testing.assert_close(read_F, frequency_F)
    assert read_size == pytest.approx(size)


def test_longrope_copies_its_divisors_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step under CUDA's capture cannot copy what the host has."""
    position_BN, scaling = torch.arange(6)[None], LONGROPE | {"long_factor": [1.0, 2.0, 3.0, 4.0]}
    first = rotary(position_BN, 8, 1e4, torch.float32, scaling, 128)
    monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(torch.stack(rotary(position_BN, 8, 1e4, torch.float32, scaling, 128)), torch.stack(first))


def test_layer_options_between_keeps_only_differences_from_target() -> None:
    of = tiny_target().shape
    own = LayerOptions(kv_heads=4, rope_theta=5.0, rope_scaling=LINEAR)
    assert LayerOptions.between(own.shape(of), of) == own == LayerOptions.of(asdict(own))
    latent = LayerOptions(**LATENT)  # its KV heads and head width are no target's, and options may name them
    assert LayerOptions.between(latent.shape(of, latent=True), of) == LayerOptions(**LATENT, kv_heads=4, head_dim=4)
    assert LayerOptions(**LATENT, kv_heads=4, head_dim=4).shape(of, latent=True) == latent.shape(of, latent=True)
    assert LayerOptions(heads=of.heads).shape(of) == LayerOptions().shape(of)
    assert LayerOptions.between(LayerOptions(heads=of.heads).shape(of), of) == LayerOptions.between(None, of) == LayerOptions()


def test_layer_options_for_mla_target_kv_heads_default_to_heads() -> None:
    """Its configuration has a number of KV heads that nothing reads: 128, unless it is given."""
    latent = {"num_attention_heads": 4, "qk_rope_head_dim": 4}
    for kv_heads, wanted in ((None, 4), (3, 4), (2, 2)):
        config = DeepseekV3Config(**latent, **({} if kv_heads is None else {"num_key_value_heads": kv_heads}))
        layer = LayerOptions().shape(shape_of(config))
        assert (layer.heads, layer.kv_heads, layer.head_dim) == (4, wanted, 4)


def test_layer_options_that_cannot_be_are_refused_in_one_line(subtests: pytest.Subtests) -> None:
    of = tiny_target().shape
    for given, says in (
        ({"heads": 3}, "drafter.layer has 3 heads of width 8 over 2 KV heads; choose an even width, and KV heads that divide"),
        ({"head_dim": 7}, "heads of width 7"),
        ({"rope_theta": -1.0}, r"drafter.layer.rope_theta is -1; set it above 0, or null"),
        ({"intermediate_size": 0}, r"drafter.layer.intermediate_size is 0; set it to 1 or more, or null"),
        ({"depth": 3}, r"drafter.layer has no setting depth; it has heads, kv_heads"),
        (
            {"rope_scaling": {"rope_type": "su"}},
            "rope_scaling is of the type 'su'; layers of drafters know default, linear",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lacks original_max_position_embeddings; add numbers"),
        ({"rope_scaling": YARN | {"attn_factor": 1.0}}, "rope_scaling of the type yarn has no attn_factor; it has factor, "),
        ({"rope_scaling": YARN | {"beta_fast": "x"}}, "rope_scaling's beta_fast is 'x'; numbers above 0 are needed"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; an object is needed"),
        ({"rope_scaling": LONGROPE}, "long_factor has 16 numbers; heads of width 8 need 4"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of the type linear lacks factor; add numbers"),
    ):
        with subtests.test(given=given):
            with pytest.raises(UserError, match=says) as caught:
                LayerOptions.of(given).shape(of)
            assert "\n" not in str(caught.value)


def test_layer_options_of_latent_attention_that_cannot_be_are_refused(subtests: pytest.Subtests) -> None:
    of = tiny_target().shape
    for allowed, given, says in (
        (False, LATENT, "drafter.layer has kv_lora_rank, .*, of latent attention; this family has ordinary attention: leave"),
        (True, {"q_lora_rank": 4}, "drafter.layer has q_lora_rank, of latent attention; set drafter.layer.kv_lora_rank"),
        (True, LATENT | {"kv_heads": 2}, "drafter.layer.kv_heads is 2 with latent attention, where it can only be 4; leave"),
        (True, LATENT | {"head_dim": 8}, "drafter.layer.head_dim is 8 with latent attention, where it can only be 4; leave"),
        (True, LATENT | {"sliding_window": 9}, "drafter.layer.sliding_window is 9 with latent .* can only be null; leave it"),
        (True, LATENT | {"attention_sinks": True}, "drafter.layer.attention_sinks is True with latent .* can only be False"),
        (True, LATENT | {"qk_rope_head_dim": 5}, "heads of width 5"),
        (True, LATENT | {"rope_scaling": LINEAR}, "in latent attention engines know yarn alone, without attention_factor"),
        (True, LATENT | {"rope_scaling": YARN | {"truncate": False}}, "in latent attention engines know yarn alone"),
        (True, LATENT | {"rope_scaling": YARN | {"mscale": 1.0}}, "with both of mscale and mscale_all_dim or neither"),
    ):
        with subtests.test(given=given), pytest.raises(UserError, match=says):
            LayerOptions.of(given).shape(of, latent=allowed)


@pytest.mark.parametrize("family", ["eagle", "mtp", "peagle", "dflash"])
def test_family_with_ordinary_attention_refuses_latent_attention(family: str) -> None:
    with pytest.raises(UserError, match="of latent attention; this family has ordinary attention: leave it out"):
        build(family, tiny_target(), layer=LATENT)


@pytest.mark.parametrize("query_rank", [None, 10])
@pytest.mark.parametrize("scaling", [{}, YARN, YARN | {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 4.0}])
@pytest.mark.parametrize("width", [5, 30])
def test_latent_attention_equals_transformers_deepseek_v3(query_rank: int | None, scaling: dict[str, Any], width: int) -> None:
    """Of twice the hidden size, as EAGLE-3's first layer reads it; values narrower and wider than queries."""
    fields = LATENT | {"q_lora_rank": query_rank, "v_head_dim": width}
    rope = {"rope_type": "default", **scaling, "rope_theta": 500.0}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 3, "num_key_value_heads": 3, "n_routed_experts": 8}
    config = DeepseekV3Config(**sizes, **fields, rope_parameters=rope, attn_implementation="eager")
    theirs = DeepseekV3Attention(config, 0)
    for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"):
        if (first := getattr(theirs, name)) is not None:
            setattr(theirs, name, nn.Linear(64, first.out_features, bias=False))
    of = TargetShape(64, 32, 2, 3, 1, 8, 48, config.max_position_embeddings, 500.0, 1e-6)
    shape = LayerOptions(**fields, rope_scaling=scaling or None).shape(of, latent=True)
    ours = MultiHeadLatentAttention(AttentionShape.of(shape, 64))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    x_BNI, position_BN = torch.randn(2, 9, 64), torch.arange(9)[None] + torch.tensor([[0], [200]])
    angles = DeepseekV3RotaryEmbedding(config)(x_BNI, position_BN)
    with torch.no_grad():
        wanted = theirs(x_BNI, angles, torch.full((9, 9), -torch.inf).triu(1))[0]
        found = ours.out(F.scaled_dot_product_attention(*ours.qkv(x_BNI, position_BN), is_causal=True))
    assert ours.scaling == pytest.approx(theirs.scaling)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_layer_options_overrides_set_rope_theta_and_scaling() -> None:
    register()
    typed = ["drafter=eagle3", "drafter.layer.rope_theta=500", "drafter.layer.rope_scaling={rope_type:linear,factor:2.0}"]
    with initialize_config_module("drafttrain.conf", version_base="1.3"):
        layer = compose("config", typed).drafter.layer
    assert layer.rope_theta == 500.0 and dict(layer.rope_scaling) == LINEAR


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_scaled_positions_training_predictions_equal_draft_tokens(name: str) -> None:
    """A size of rotated queries and keys is in the decoder's tables too."""
    yarn = YARN | {"attention_factor": 2.0, "original_max_position_embeddings": 8}
    target, prompt = fast_target(), prompts(1, seed=8, longest=30)[0] + [5, 9, 2, 8, 1, 30, 12, 40, 2, 2, 7, 9, 3, 6, 4]
    drafted, predicted = drafted_and_predicted(target, build(name, target, 1.0, layer={"rope_scaling": yarn}), prompt)
    plain, _ = drafted_and_predicted(target, build(name, target, 1.0), prompt)
    assert predicted == drafted != plain
