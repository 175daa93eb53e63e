"""Latent attention over its cache: the absorbed and the expanded form agree, and the cache holds latents alone."""

from __future__ import annotations

import pytest
import torch

from drafttrain.model import attention
from drafttrain.model import latent_attention as module
from drafttrain.model.latent_attention import LatentAttention
from drafttrain.model.target import Taps
from drafttrain.ops import library
from drafttrain.targets.fast import FastTarget
from tests.architectures import model_of

NODES, LONG = 5, 70


@pytest.fixture(scope="module")
def target() -> FastTarget:
    return FastTarget(model_of("DeepSeek-V3", num_hidden_layers=2))


def verified(target: FastTarget, chunks: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits of a prompt's chunks and of a tree after it; two rows whose prompts end at different positions."""
    generator = torch.Generator().manual_seed(2)
    token_BT = torch.randint(0, 60, (2, sum(chunks)), generator=generator)
    kv, found, start = target.new_cache(2, sum(chunks) + NODES), [], 0
    with torch.no_grad():
        for size in chunks:
            at_BN = kv.length_B[:, None] + torch.arange(size)
            found.append(target(token_BT[:, start : start + size], kv, None, at_BN, Taps()).logits_BRV)
            kv.keep(torch.arange(size).expand(2, -1), torch.tensor([size, size - 3]))
            start += size
        parents = [-1, 0, 0, 1, 2]
        seen_NN = torch.eye(NODES, dtype=torch.bool)
        for node, parent in enumerate(parents[1:], 1):
            seen_NN[node] |= seen_NN[parent]
        position_BN = kv.length_B[:, None] + seen_NN.sum(1) - 1
        found.append(target(token_BT[:, :NODES], kv, seen_NN.expand(2, -1, -1), position_BN, Taps()).logits_BRV)
    return found


@pytest.mark.parametrize("chunks", [(9, 6), (LONG, LONG + 10)])
@pytest.mark.parametrize("limit", [1, 2**25])
def test_latent_attention_absorbed_equals_expanded(
    target: FastTarget, chunks: tuple[int, ...], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """limit: of the numbers in memory, so that one head is expanded at a time, and absorbed scores are computed in parts."""
    monkeypatch.setattr(module, "EXPANDED", limit)
    monkeypatch.setattr(module, "SCORES", limit)
    monkeypatch.setattr(LatentAttention, "expands", lambda *sizes: False)
    absorbed = verified(target, chunks)
    monkeypatch.setattr(LatentAttention, "expands", lambda *sizes: True)
    whole = LatentAttention._expanded
    monkeypatch.setattr(LatentAttention, "_absorbed", lambda self, d, e, *more: whole(self, *_queries(d, e), *more))
    for found, wanted in zip(absorbed, verified(target, chunks), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


def _queries(q_BNhD: torch.Tensor, q_BNhE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([q_BNhD, q_BNhE], -1).transpose(1, 2), q_BNhD  # vectors of new positions are read from the cache


def test_latent_attention_in_bfloat16_uses_expanded_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model rounds: the absorbed form changes more tokens than near-ties explain."""
    monkeypatch.setattr(LatentAttention, "_absorbed", None)
    target = FastTarget(model_of("DeepSeek-V3", num_hidden_layers=2).bfloat16())
    assert target.trees and len(verified(target, (9, 6))) == 3


def test_latent_attention_of_kernels_in_bfloat16_is_as_close_to_float32_as_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed over the pages, as on a GPU; the twin of the attention kernel runs here."""
    made = [model_of("DeepSeek-V3", num_hidden_layers=2, first_k_dense_replace=2).bfloat16() for _ in range(3)]
    exact, expanded = verified(FastTarget(made[0].float()), (9, 6)), verified(FastTarget(made[1]), (9, 6))
    monkeypatch.setattr(library, "serves", lambda x: False)
    monkeypatch.setattr(attention, "pages_in_place", lambda kv: kv.page_view())
    target = FastTarget(made[2])
    monkeypatch.setattr(LatentAttention, "_expanded", None)
    absorbed = verified(target, (9, 6))
    for found, other, wanted in zip(absorbed, expanded, exact, strict=True):
        assert (found - wanted).norm() < 1.2 * (other - wanted).norm() < 0.05 * wanted.norm()


def test_latent_attention_cache_bytes_are_latent_and_one_rotary_key(target: FastTarget) -> None:
    """32 + 8 numbers a layer, instead of four heads' keys of 24 and values of 12."""
    assert target.cache_bytes().position == 2 * (32 + 8) * 4


def test_latent_attention_chooses_form_with_fewer_multiplications(target: FastTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """At DeepSeek-V3's sizes a chunk is expanded when it has more than 171 positions, less where its prefix is short."""
    latent = target._chain[0].latent
    for width, size in (("latent", 512), ("rotated", 64), ("plain", 128), ("value", 128)):
        monkeypatch.setattr(latent, width, size)
    assert latent.expands(0, 2) and not latent.expands(10**6, 170) and latent.expands(10**6, 180)
    assert not latent.expands(4096, 16) and latent.expands(30, 70)


def test_latent_attention_joined_maps_with_one_bias_equal_transformers() -> None:
    """Queries without a latent have no bias where the latents' map has one."""
    model = model_of("DeepSeek-V2", num_hidden_layers=2, q_lora_rank=None, attention_bias=True)
    torch.nn.init.normal_(model.model.layers[0].self_attn.kv_a_proj_with_mqa.bias)
    token_1T = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(token_1T).logits
        found = FastTarget(model)(token_1T, None, None, token_1T, Taps()).logits_BRV
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
