"""Layers that drafters share: RMS norm, residual block, rotary attention, gated MLP. `cached_layers` decodes with them.

Shapes: B rows, N positions, P positions of a table, h heads, D head width, F half of it, H hidden, I input width of a
projection. In latent attention: C latent, E rotated part of a query and key, V value, W the wider of a query and a value, X a
sum of widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafttrain.model.shapes import CONTEXT, LATENT_FIELDS, SCALINGS, LayerShape, TargetShape
from drafttrain.ops.gated import gate
from drafttrain.ops.linear import PACKS, linear
from drafttrain.ops.rms_norm import rms_norm, trained_norm
from drafttrain.ops.rotary import rotate


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight, computed in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    @property
    def variance_epsilon(self) -> float:
        """`eps`, as transformers' modules name it."""
        return self.eps

    def forward(self, x_H: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return rms_norm(x_H, None, self.weight, self.eps)[1]
        return trained_norm(x_H, self.weight, self.eps)


class Linear(nn.Linear):
    """A linear map that decoding computes with a packed copy of its weight, where that is large and frozen (`ops.linear`)."""

    def forward(self, x_I: Tensor) -> Tensor:
        packed = None if torch.is_grad_enabled() else PACKS.of(self, self.weight, x_I)
        return linear(x_I, self.weight, self.bias, packed)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), W zero at the start, so that a fresh block is the identity up to its bias (arXiv 2401.10774)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_H: Tensor) -> Tensor:
        return x_H + F.silu(self.linear(x_H))


class GatedMLP(nn.Module):
    """down(SiLU(gate x) * up x), as in Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_H: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            out_H: Tensor = self.down_proj(gate(self.gate_proj(x_H), self.up_proj(x_H)))
            return out_H
        out_H = self.down_proj(F.silu(self.gate_proj(x_H)) * self.up_proj(x_H))
        return out_H


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The dimensions of one attention module."""

    in_width: int  # of the input, I; some drafters read two states at once
    width: int  # of the output, H
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    qk_eps: float | None = None  # of an RMS norm of each query and key before rotation (Henry et al. 2020); None: no norm
    rope_scaling: Mapping[str, Any] | None = None  # as `LayerShape.rope_scaling`
    context: int = 0  # positions that there are, by which longrope chooses
    window: int | None = None  # positions that a query sees at most, its own included; None: all
    latent: LayerShape | None = None  # has the ranks and widths of latent attention; None: ordinary attention
    sinks: bool = False  # as `LayerShape.attention_sinks`

    @staticmethod
    def of(shape: TargetShape, in_width: int, qk_norm: bool = False, number: int = 0) -> AttentionShape:
        """The dimensions for a drafter's layer whose output has the target's hidden size. number: of the layer, from 0."""
        layer_shape = shape if isinstance(shape, LayerShape) else None
        latent = layer_shape if layer_shape is not None and layer_shape.kv_lora_rank is not None else None
        return AttentionShape(
            in_width,
            shape.hidden_size,
            shape.heads,
            shape.kv_heads,
            shape.head_dim + (0 if latent is None else latent.qk_nope_head_dim or 0),
            shape.rope_theta,
            shape.norm_eps if qk_norm else None,
            None if layer_shape is None else layer_shape.rope_scaling,
            shape.max_positions,
            None if layer_shape is None else layer_shape.window(number),
            latent,
            layer_shape is not None and layer_shape.attention_sinks,
        )


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (Su et al. 2021), in separate parts that families combine."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.in_width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.in_width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.in_width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.q_norm, self.k_norm = (
            nn.Identity() if shape.qk_eps is None else RMSNorm(shape.head_dim, shape.qk_eps) for _ in range(2)
        )
        if shape.sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(shape.heads))  # named as in vLLM and ModelOpt

    def forward(self) -> Tensor:
        """[h] the sinks. Only this is a call of the module, because sharded parameters are gathered for calls."""
        return self.attention_sink_bias

    @property
    def sinks(self) -> Tensor | None:
        """[h] a score of each head, in the unit of scaled scores, or None; as transformers' modules name it."""
        return self() if self.shape.sinks else None

    @property
    def head_dim(self) -> int:
        """The width of a head, as transformers' modules name it."""
        return self.shape.head_dim

    @property
    def scaling(self) -> float:
        """The factor of the scores, as transformers' modules name it."""
        return float(self.shape.head_dim**-0.5)

    @property
    def cached(self) -> tuple[int, int, int]:
        """What decoding caches of a position: the number of heads, the widths of a key and of a value."""
        return self.shape.kv_heads, self.shape.head_dim, self.shape.head_dim

    def angle_table(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions 0, 1, 2, ..., [positions, D]; the first half of each sine is negated."""
        weight = self.o_proj.weight
        position_1P = torch.arange(positions, device=weight.device)[None]
        cos_1PD, sin_1PD = self._angles(position_1P, weight.dtype)
        sin_PD = sin_1PD[0].clone()
        sin_PD[:, : sin_PD.shape[1] // 2] *= -1
        return cos_1PD[0], sin_PD

    def qkv(self, x_BNI: Tensor, position_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, h, N, D], k and v [B, h_kv, N, D]; q and k rotated to their positions."""
        angles = self._angles(position_BN, x_BNI.dtype)
        q_BhND = rotate(self.q_norm(self._heads(self.q_proj(x_BNI))), *angles)
        return q_BhND, rotate(self.k_norm(self._heads(self.k_proj(x_BNI))), *angles), self._heads(self.v_proj(x_BNI))

    def kv(self, x_BNI: Tensor, position_BN: Tensor) -> tuple[Tensor, Tensor]:
        """k and v as from `qkv`, for positions without queries."""
        angles = self._angles(position_BN, x_BNI.dtype)
        return rotate(self.k_norm(self._heads(self.k_proj(x_BNI))), *angles), self._heads(self.v_proj(x_BNI))

    def _angles(self, position_BN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = self.shape
        return rotary(position_BN, shape.head_dim, shape.rope_theta, dtype, shape.rope_scaling, shape.context)

    def _heads(self, x_BNI: Tensor) -> Tensor:
        return x_BNI.view(*x_BNI.shape[:2], -1, self.shape.head_dim).transpose(1, 2)

    def grouped(self, x_BhND: Tensor) -> Tensor:
        """Repeat KV heads to the number of query heads."""
        return x_BhND.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1)

    def out(self, mixed_BhND: Tensor) -> Tensor:
        """[B, N, H]: the output projection of all heads."""
        B, _, N, _ = mixed_BhND.shape
        out_BNH: Tensor = self.o_proj(mixed_BhND.transpose(1, 2).reshape(B, N, -1))
        return out_BNH


class ContextAttention(Attention):
    """Attention whose positions without queries have maps of their own, named as in DFlare's code."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.k_proj_target = nn.Linear(shape.in_width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj_target = nn.Linear(shape.in_width, shape.kv_heads * shape.head_dim, bias=False)

    def kv(self, x_BNI: Tensor, position_BN: Tensor) -> tuple[Tensor, Tensor]:
        angles = self._angles(position_BN, x_BNI.dtype)
        return rotate(self.k_norm(self._heads(self.k_proj_target(x_BNI))), *angles), self._heads(self.v_proj_target(x_BNI))


class MultiHeadLatentAttention(Attention):
    """Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1), with DeepSeek-V3's names and rotary pairs.

    `qkv` gives every head keys and values of its own, for training. Decoding caches latents (`latent_attention`).
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __init__(self, shape: AttentionShape) -> None:
        nn.Module.__init__(self)  # its maps are others
        latent, queries = shape.latent, shape.heads * shape.head_dim
        assert latent is not None
        self.shape, self.num_heads = shape, shape.heads
        for name in LATENT_FIELDS:
            setattr(self, name, getattr(latent, name))
        if self.q_lora_rank is None:
            self.q_proj = nn.Linear(shape.in_width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(shape.in_width, self.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(self.q_lora_rank, latent.norm_eps)
            self.q_b_proj = nn.Linear(self.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.in_width, self.kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, latent.norm_eps)
        expanded = shape.heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.v_head_dim, shape.width, bias=False)

    @property
    def scaling(self) -> float:
        return super().scaling * self._growth

    @property
    def _growth(self) -> float:
        """What yarn multiplies scores by: `mscale_all_dim` counts for the queries and for the keys, as in DeepSeek-V3."""
        rope = self.shape.rope_scaling or {}
        mscale, factor = float(rope.get("mscale_all_dim") or 0.0), float(rope.get("factor", 1.0))
        return (0.1 * mscale * math.log(max(factor, 1.0)) + 1.0) ** 2

    @property
    def cached(self) -> tuple[int, int, int]:
        return 1, self.kv_lora_rank + self.qk_rope_head_dim, 0

    def qkv(self, x_BNI: Tensor, position_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, h, N, W]: values or else queries and keys end in zeros. q holds what of the scores' factor is not
        W ** -0.5.
        """
        heads, angles = self.shape.heads, self._angles(position_BN, x_BNI.dtype)
        q_a = None if self.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x_BNI))
        q_BNX = self.q_proj(x_BNI) if q_a is None else self.q_b_proj(q_a)
        q_BNhD, q_BNhE = q_BNX.unflatten(-1, (heads, -1)).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent_BNC, key_BNE = self.kv_a_proj_with_mqa(x_BNI).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        kv_BNhX = self.kv_b_proj(self.kv_a_layernorm(latent_BNC.contiguous())).unflatten(-1, (heads, -1))
        k_BNhD, v_BNhV = kv_BNhX.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        key_BNhE = _rotated_neighbours(key_BNE[:, :, None], angles).expand(-1, -1, heads, -1)
        q_BNhQ = torch.cat([q_BNhD, _rotated_neighbours(q_BNhE, angles)], -1)
        k_BNhQ = torch.cat([k_BNhD, key_BNhE], -1)
        W = max(self.shape.head_dim, self.v_head_dim)  # one width for all is what the fused operators take
        factor = self._growth * (W / self.shape.head_dim) ** 0.5
        q_BNhQ = q_BNhQ if factor == 1.0 else q_BNhQ * factor
        q_BhNW, k_BhNW, v_BhNW = (F.pad(x, (0, W - x.shape[-1])).transpose(1, 2) for x in (q_BNhQ, k_BNhQ, v_BNhV))
        return q_BhNW, k_BhNW, v_BhNW

    def _angles(self, position_BN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = self.shape
        return rotary(position_BN, self.qk_rope_head_dim, shape.rope_theta, dtype, shape.rope_scaling, shape.context)

    def out(self, mixed_BhND: Tensor) -> Tensor:
        """As `Attention.out`, of means of the values from `qkv`."""
        return super().out(mixed_BhND[..., : self.v_head_dim])


class DecoderLayer(nn.Module):
    """Attention and a gated MLP with a norm before each, named as in Llama. A family calls `self_attn` itself."""

    def __init__(
        self, shape: TargetShape, in_width: int | None = None, qk_norm: bool = False, input_norm: bool = True, number: int = 0
    ) -> None:
        """in_width: of attention's input; None: the target's hidden size. input_norm: a norm before attention.

        number: of the layer in its drafter, from 0: layers may differ in their sliding windows.
        """
        super().__init__()
        width, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = RMSNorm(width, eps) if input_norm else nn.Identity()
        attention_shape = AttentionShape.of(shape, in_width or width, qk_norm, number)
        has_latents = attention_shape.latent is not None
        self.self_attn: Attention = (MultiHeadLatentAttention if has_latents else Attention)(attention_shape)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, shape.intermediate_size)

    def leave(self, residual_H: Tensor, attended_H: Tensor) -> Tensor:
        """[..., H] the layer's output, from the residual around attention and attention's output."""
        state_H = residual_H + attended_H
        out_H: Tensor = state_H + self.mlp(self.post_attention_layernorm(state_H))
        return out_H


def _rotated_neighbours(x_BNhE: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Neighbouring values rotated together, in another order, on which no score depends: queries and keys have the same."""
    halves_BNhE = torch.cat([x_BNhE[..., ::2], x_BNhE[..., 1::2]], -1)
    return rotate(halves_BNhE.transpose(1, 2), *angles).transpose(1, 2)


def recomputed(again: bool, function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs). again: with gradients, store its result alone and recompute the rest in the backward pass
    (arXiv 1604.06174)."""
    if again and torch.is_grad_enabled():
        return checkpoint(function, *inputs, use_reentrant=False)
    return function(*inputs)


def rotary(
    position_BN: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: Mapping[str, Any] | None = None,
    context: int = 0,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, N, D], the two halves of a head paired as in transformers. context: positions that there are."""
    power_F = torch.arange(0, head_dim, 2, device=position_BN.device, dtype=torch.float32) / head_dim
    frequency_F, size = scaled_frequencies(theta**-power_F, theta, scaling, context)
    angle_BND = position_BN[..., None].float() * frequency_F
    angle_BND = torch.cat([angle_BND, angle_BND], -1)
    cos_BND, sin_BND = angle_BND.cos(), angle_BND.sin()
    if size != 1.0:
        cos_BND, sin_BND = cos_BND * size, sin_BND * size
    return cos_BND.to(dtype), sin_BND.to(dtype)


def scaled_frequencies(
    frequency_F: Tensor, theta: float, scaling: Mapping[str, Any] | None, context: int
) -> tuple[Tensor, float]:
    """([F] radians per position for each pair of a head's numbers, the size of rotated queries and keys).

    llama3: low frequencies are divided by `factor`, high ones stay, and those between are interpolated (arXiv 2407.21783).
    dynamic changes nothing in the context that a model was trained for, and drafters' layers have no longer one.
    """
    rope_type = "default" if scaling is None else str(scaling.get("rope_type", "default"))
    if scaling is None or rope_type in ("default", "dynamic"):
        return frequency_F, 1.0
    if rope_type == "linear":
        return frequency_F / float(scaling["factor"]), 1.0
    if rope_type == "yarn":
        return _yarn(frequency_F, theta, scaling)
    if rope_type == "longrope":
        return _longrope(frequency_F, scaling, context)
    if rope_type == "proportional":
        rotated = int(float(scaling.get("partial_rotary_factor") or 1.0) * len(frequency_F))
        keep_F = torch.arange(len(frequency_F), device=frequency_F.device) < rotated
        return frequency_F * keep_F / float(scaling.get("factor") or 1.0), 1.0
    low, high, length = (float(scaling[name]) for name in SCALINGS["llama3"][1:])
    keep_F = ((frequency_F * (length / (2 * math.pi)) - low) / (high - low)).clamp(0.0, 1.0)
    return frequency_F * (keep_F + (1.0 - keep_F) / float(scaling["factor"])), 1.0


def _yarn(frequency_F: Tensor, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Pairs that turn often in the original context stay, slow ones are divided by `factor`, and those between are
    interpolated (arXiv 2309.00071). `truncate` rounds the bounds between them to whole pairs.
    """
    factor, pairs = float(scaling["factor"]), len(frequency_F)
    first, last = (
        pairs * math.log(float(scaling[CONTEXT]) / (2 * math.pi * rotations)) / math.log(theta)
        for rotations in (float(scaling.get("beta_fast") or 32.0), float(scaling.get("beta_slow") or 1.0))
    )
    if scaling.get("truncate", True) is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last = last + 0.001 if last == first else last
    slow_F = ((torch.arange(pairs, device=frequency_F.device, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    frequency_F = frequency_F / factor * slow_F + frequency_F * (1.0 - slow_F)
    if scaling.get("attention_factor") is not None:
        return frequency_F, float(scaling["attention_factor"])
    has_mscale = scaling.get("mscale") and scaling.get("mscale_all_dim")
    mscale, mscale_all_dim = (scaling["mscale"], scaling["mscale_all_dim"]) if has_mscale else (1.0, 0.0)
    growth = 0.1 * math.log(max(factor, 1.0))
    return frequency_F, (float(mscale) * growth + 1.0) / (float(mscale_all_dim) * growth + 1.0)


def _longrope(frequency_F: Tensor, scaling: Mapping[str, Any], context: int) -> tuple[Tensor, float]:
    """A divisor of its own for each pair (arXiv 2402.13753): `long_factor` where the context is longer than the original one.

    As in vLLM, the context of the model decides, not the length of a text: all texts are rotated alike.
    """
    original = float(scaling[CONTEXT])
    divisors = scaling["long_factor" if context > original else "short_factor"]
    factor = float(scaling.get("factor") or context / original)
    size = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    size = size if scaling.get("attention_factor") is None else float(scaling["attention_factor"])
    return frequency_F / _on_device(tuple(divisors), frequency_F.device), size


@cache
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """The numbers as a tensor, made once: a captured step cannot copy what the host has."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device, dtype=torch.float32)
