"""A drafter's layers in decoding: the layers' own result, weights that change, copies, training after decoding."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.model.cached_layers import CachedLayers, FusedLayers
from drafttrain.model.layers import DecoderLayer
from drafttrain.model.shapes import LayerOptions, TargetShape
from drafttrain.ops import library
from tests.cases import with_grid
from tests.exports import LATENT

SHAPE = TargetShape(64, 32, 2, 4, 2, 8, 48, 128, 1e4, 1e-5)
FEW = [(1, False, True), (3, True, True), (3, False, False), (1, True, False)]


def layers(count: int, qk_norm: bool = False, shape: TargetShape = SHAPE) -> list[DecoderLayer]:
    torch.manual_seed(count)
    return [DecoderLayer(shape, qk_norm=qk_norm).requires_grad_(False) for _ in range(count)]


def plain(made: Sequence[DecoderLayer], x_BTH: Tensor) -> Tensor:
    """All positions at once, causal, by the modules themselves."""
    position_BT = torch.arange(x_BTH.shape[1]).expand(x_BTH.shape[:2])
    for layer in made:
        q, k, v = layer.self_attn.qkv(layer.input_layernorm(x_BTH), position_BT)
        keys, values = layer.self_attn.grouped(k), layer.self_attn.grouped(v)
        x_BTH = layer.leave(x_BTH, layer.self_attn.out(F.scaled_dot_product_attention(q, keys, values, is_causal=True)))
    return x_BTH


def decoded(fused: FusedLayers, x_BTH: Tensor, parts: Sequence[int]) -> Tensor:
    """The same in passes of so many positions, each committed."""
    cached, done, start = CachedLayers(fused, len(x_BTH), max(64, x_BTH.shape[1])), [], 0
    with torch.inference_mode():
        for count in parts:
            meta = cached.meta(cached.after_prefix(count))
            x, delta = fused.run(x_BTH[:, start : start + count].clone(), meta)
            cached.keep_first(torch.full((len(x_BTH),), count))
            done.append(x + delta)
            start += count
    return torch.cat(done, 1)


@pytest.mark.parametrize(("count", "qk_norm", "whole_call"), with_grid(FEW, (1, 3), (False, True), (True, False)))
def test_fused_layers_decoding_equals_decoder_layers(
    count: int, qk_norm: bool, whole_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole_call:
        monkeypatch.setattr(library, "has_product", lambda: False)
    made, x = layers(count, qk_norm), torch.randn(2, 9, 32)
    found = decoded(FusedLayers(made), x, (1, 4, 3, 1))
    torch.testing.assert_close(found, plain(made, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("query_rank", [None, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_with_latent_attention_equal_decoder_layers_and_cache_latents(
    query_rank: int | None, dtype: torch.dtype
) -> None:
    shape = LayerOptions(**LATENT, q_lora_rank=query_rank).shape(SHAPE, latent=True)
    made, x = [layer.to(dtype) for layer in layers(2, shape=shape)], torch.randn(2, 90, 32, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(decoded(FusedLayers(made), x, (80, 1, 4, 5)), plain(made, x), rtol=tolerance, atol=tolerance)
    assert CachedLayers(FusedLayers(made), 1, 64).kv.bytes_per_position == 2 * (12 + 4) * dtype.itemsize


@pytest.mark.parametrize("trained", [False, True])
def test_fused_layers_new_session_uses_changed_weights(trained: bool) -> None:
    made, x = layers(2), torch.randn(1, 5, 32)
    for layer in made:
        layer.requires_grad_(trained)
    fused = FusedLayers(made)
    for _ in range(3):
        with torch.no_grad():
            wanted = plain(made, x)
            torch.testing.assert_close(decoded(fused, x, (2, 3)), wanted, rtol=1e-4, atol=1e-5)
            for parameter in (p for layer in made for p in layer.parameters()):
                parameter.data.mul_(1.1)


def test_fused_layers_copy_is_independent_and_layers_stay_trainable() -> None:
    made, x = layers(1), torch.randn(1, 5, 32)
    fused = FusedLayers(made)
    with torch.inference_mode():
        before = decoded(fused, x, (5,))
    copied = copy.deepcopy(fused)
    for parameter in copied.layers[0].parameters():
        parameter.data.zero_()
    assert torch.equal(decoded(fused, x, (5,)), before) and not torch.equal(decoded(copied, x, (5,)), before)
    made[0].requires_grad_()
    plain(made, x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in made[0].parameters())
