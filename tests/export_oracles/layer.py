"""Shared by the readers: a decoder layer in plain torch, with Llama's names.

Shapes: N positions fed, P positions seen, h heads, D head width, F half of it, H hidden, I input width of attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.parts import Config, MismatchError, Tensors


@dataclass(frozen=True, slots=True)
class LayerDimensions:
    """A decoder layer's dimensions, from the fields that all stacks read."""

    width: int
    inner: int  # width of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    theta: float  # rope_theta
    eps: float
    max_positions: int
    scaling: dict[str, Any]  # of rotary positions
    paired: bool = False  # rotate neighbouring values, where most models rotate the two halves of a head
    windows: tuple[int | None, ...] = ()  # positions that a query of each layer sees, its own included; (): all see all
    latent: dict[str, Any] = field(default_factory=dict)  # the fields of latent attention; {}: the layers have heads
    sinks: bool = False  # each head has a score that takes its share of the softmax and adds nothing

    @staticmethod
    def of(config: Config) -> LayerDimensions:
        """The dimensions in a configuration."""
        rope = config.values.get("rope_parameters") or {}
        theta = rope["rope_theta"] if "rope_theta" in rope else config.get("rope_theta", "rope")
        scaling = rope or config.values.get("rope_scaling") or {}
        names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = {name: config.values.get(name) for name in names} if "kv_lora_rank" in config.values else {}
        return LayerDimensions(
            config.get("hidden_size", "config"),
            config.get("intermediate_size", "config"),
            config.get("num_attention_heads", "heads"),
            config.get("num_key_value_heads", "heads"),
            latent["qk_rope_head_dim"] if latent else config.get("head_dim", "head_dim"),
            float(theta),
            config.get("rms_norm_eps", "norm"),
            config.get("max_position_embeddings", "max positions"),
            scaling,
            paired=bool(latent),
            windows=_windows(config),
            latent=latent,
        )

    @property
    def kind(self) -> str:
        """The kind of rotary scaling."""
        return str(self.scaling.get("rope_type") or self.scaling.get("type") or "default")

    def facts(self) -> dict[str, Any]:
        """The settings that the files have."""
        return {
            "rope": self.theta,
            "rope scaling": self.kind,
            "norm": self.eps,
            "head_dim": self.head_dim,
            "heads": [self.heads, self.kv_heads],
            "max positions": self.max_positions,
            **({"windows": list(self.windows)} if any(self.windows) else {}),
        }


def _windows(config: Config) -> tuple[int | None, ...]:
    kinds = config.values.get("layer_types") or ()
    if "sliding_attention" not in kinds:
        return ()
    window = config.get("sliding_window", "windows")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Layer:
    """Attention and gated MLP of one layer. in_width: input width of attention. bias: of q, k and v. norms: of each head's q
    and k. number: of the layer, from 0.
    """

    def __init__(
        self,
        tensors: Tensors,
        prefix: str,
        shape: LayerDimensions,
        in_width: int,
        bias: bool = False,
        norms: bool = False,
        number: int = 0,
    ) -> None:
        self.shape = shape
        self.window = shape.windows[number] if shape.windows else None
        mlp = f"{prefix}.mlp"
        self.take_attention(tensors, f"{prefix}.self_attn", in_width, bias, norms)
        self.sinks = tensors.take(f"{prefix}.self_attn.attention_sink_bias", shape.heads) if shape.sinks else None
        self.gate = tensors.take(f"{mlp}.gate_proj.weight", shape.inner, shape.width)
        self.up = tensors.take(f"{mlp}.up_proj.weight", shape.inner, shape.width)
        self.down = tensors.take(f"{mlp}.down_proj.weight", shape.width, shape.inner)
        self.post = tensors.take(f"{prefix}.post_attention_layernorm.weight", shape.width)

    def take_attention(self, tensors: Tensors, attention: str, in_width: int, bias: bool, norms: bool) -> None:
        """Attention's tensors."""
        shape = self.shape
        sizes = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim, "v": shape.kv_heads * shape.head_dim}
        self.qkv = {x: tensors.take(f"{attention}.{x}_proj.weight", n, in_width, fails="head_dim") for x, n in sizes.items()}
        self.bias = {x: tensors.take(f"{attention}.{x}_proj.bias", n) for x, n in sizes.items()} if bias else {}
        self.norms = {x: tensors.take(f"{attention}.{x}_norm.weight", shape.head_dim) for x in "qk"} if norms else {}
        self.o = tensors.take(f"{attention}.o_proj.weight", shape.width, sizes["q"], fails="head_dim")

    def heads(self, x_NI: Tensor, which: str, position_N: Tensor) -> Tensor:
        """[N, heads, D]: queries and keys rotated."""
        x_NhD = F.linear(x_NI, self.qkv[which], self.bias.get(which)).unflatten(-1, (-1, self.shape.head_dim))
        if which in self.norms:
            x_NhD = rms(x_NhD, self.norms[which], self.shape.eps)
        return x_NhD if which == "v" else rotated(x_NhD, position_N, self.shape)

    def attended(self, q_NhD: Tensor, k_PhD: Tensor, v_PhD: Tensor, seen_NP: Tensor) -> Tensor:
        """[N, H]: attention of the queries to the keys that `seen_NP` allows, after the output projection."""
        groups = self.shape.heads // self.shape.kv_heads
        k_PhD, v_PhD = k_PhD.repeat_interleave(groups, 1), v_PhD.repeat_interleave(groups, 1)
        score_hNP = torch.einsum("nhd,phd->hnp", q_NhD, k_PhD) / self.shape.head_dim**0.5
        score_hNP = score_hNP.masked_fill(~seen_NP, -torch.inf)
        if self.sinks is not None:
            score_hNP = torch.cat([score_hNP, self.sinks[:, None, None].expand(-1, len(q_NhD), 1)], -1)
        weight_hNP = score_hNP.softmax(-1)[..., : len(k_PhD)]
        return F.linear(torch.einsum("hnp,phd->nhd", weight_hNP, v_PhD).flatten(1), self.o)

    def mlp(self, x_NH: Tensor) -> Tensor:
        """[N, H]: the MLP, with its norm before."""
        return self.gated(rms(x_NH, self.post, self.shape.eps))

    def gated(self, normed_NH: Tensor) -> Tensor:
        """[N, H]: the MLP without its norm."""
        return F.linear(F.silu(F.linear(normed_NH, self.gate)) * F.linear(normed_NH, self.up), self.down)


class LatentLayer(Layer):
    """The same with DeepSeek's latent attention. vLLM and SGLang give its norms the layer's eps, transformers 1e-6."""

    def take_attention(self, tensors: Tensors, attention: str, in_width: int, bias: bool, norms: bool) -> None:
        widths, heads = self.shape.latent, self.shape.heads
        self.rank, self.rotary = widths["kv_lora_rank"], widths["qk_rope_head_dim"]
        self.plain, self.value, query_rank = widths["qk_nope_head_dim"], widths["v_head_dim"], widths["q_lora_rank"]
        queries = heads * (self.plain + self.rotary)
        maps = [("q_proj", queries, in_width)]
        if query_rank is not None:
            maps = [("q_a_proj", query_rank, in_width), ("q_b_proj", queries, query_rank)]
            self.q_norm = tensors.take(f"{attention}.q_a_layernorm.weight", query_rank)
        self.queries = [tensors.take(f"{attention}.{name}.weight", *size) for name, *size in maps]
        self.down_kv = tensors.take(f"{attention}.kv_a_proj_with_mqa.weight", self.rank + self.rotary, in_width)
        self.kv_norm = tensors.take(f"{attention}.kv_a_layernorm.weight", self.rank)
        self.up_kv = tensors.take(f"{attention}.kv_b_proj.weight", heads * (self.plain + self.value), self.rank)
        self.o = tensors.take(f"{attention}.o_proj.weight", self.shape.width, heads * self.value)

    def heads(self, x_NI: Tensor, which: str, position_N: Tensor) -> Tensor:
        if which == "q":
            q_NX = F.linear(x_NI, self.queries[0])
            if len(self.queries) > 1:
                q_NX = F.linear(rms(q_NX, self.q_norm, self.shape.eps), self.queries[1])
            plain_NhD, rotary_NhE = q_NX.unflatten(-1, (self.shape.heads, -1)).split([self.plain, self.rotary], -1)
            return torch.cat([plain_NhD, rotated(rotary_NhE, position_N, self.shape)], -1)
        latent_NC, key_NE = F.linear(x_NI, self.down_kv).split([self.rank, self.rotary], -1)
        kv_NhX = F.linear(rms(latent_NC, self.kv_norm, self.shape.eps), self.up_kv).unflatten(-1, (self.shape.heads, -1))
        plain_NhD, value_NhV = kv_NhX.split([self.plain, self.value], -1)
        if which == "v":
            return value_NhV
        key_N1E = rotated(key_NE[:, None], position_N, self.shape)
        return torch.cat([plain_NhD, key_N1E.expand(-1, self.shape.heads, -1)], -1)

    def attended(self, q_NhD: Tensor, k_PhD: Tensor, v_PhD: Tensor, seen_NP: Tensor) -> Tensor:
        scaling = self.shape.scaling
        mscale = 0.1 * scaling.get("mscale_all_dim", 0.0) * math.log(scaling.get("factor", 1.0)) + 1.0
        score_hNP = torch.einsum("nhd,phd->hnp", q_NhD, k_PhD) * mscale**2 / (self.plain + self.rotary) ** 0.5
        weight_hNP = score_hNP.masked_fill(~seen_NP, -torch.inf).softmax(-1)
        return F.linear(torch.einsum("hnp,phd->nhd", weight_hNP, v_PhD).flatten(1), self.o)


def layer_of(
    tensors: Tensors, prefix: str, shape: LayerDimensions, in_width: int, norms: bool = False, number: int = 0
) -> Layer:
    """A layer with the attention that its dimensions describe. Arguments as for `Layer`."""
    return (LatentLayer if shape.latent else Layer)(tensors, prefix, shape, in_width, norms=norms, number=number)


class Cache:
    """Keys and values of one layer for the positions fed so far. A new position sees earlier ones, within its window, and
    itself.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer, self.keys, self.values, self.positions = layer, list[Tensor](), list[Tensor](), list[Tensor]()

    def feed(self, x_NI: Tensor, position_N: Tensor) -> Tensor:
        """[N, H]: the output of attention."""
        self.keys.append(self.layer.heads(x_NI, "k", position_N))
        self.values.append(self.layer.heads(x_NI, "v", position_N))
        self.positions.append(position_N)
        keys, values, N = torch.cat(self.keys), torch.cat(self.values), len(x_NI)
        seen_NP = torch.ones(N, len(keys), dtype=torch.bool).tril(len(keys) - N)
        if self.layer.window is not None:
            seen_NP &= position_N[:, None] - torch.cat(self.positions) < self.layer.window
        return self.layer.attended(self.layer.heads(x_NI, "q", position_N), keys, values, seen_NP)


def rms(x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """[..., H]: the RMS norm."""
    return x_H * torch.rsqrt(x_H.pow(2).mean(-1, keepdim=True) + eps) * weight_H


def rotated(x_NhD: Tensor, position_N: Tensor, shape: LayerDimensions) -> Tensor:
    """Rotate the two halves of a head, as Llama does, or its neighbouring values."""
    try:
        frequency_F, size = _frequencies(shape)
    except KeyError as lacking:
        raise MismatchError("rope scaling", f"scaling of kind {shape.kind!r} lacks {lacking}") from lacking
    angle_NF = position_N[:, None].float() * frequency_F
    cos_N1F, sin_N1F = size * angle_NF.cos()[:, None], size * angle_NF.sin()[:, None]
    first, second = x_NhD.unflatten(-1, (-1, 2)).unbind(-1) if shape.paired else x_NhD.chunk(2, -1)
    rotated_pair = first * cos_N1F - second * sin_N1F, second * cos_N1F + first * sin_N1F
    return torch.stack(rotated_pair, -1).flatten(-2) if shape.paired else torch.cat(rotated_pair, -1)


def _frequencies(shape: LayerDimensions) -> tuple[Tensor, float]:
    plain_F = shape.theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    if "factors" in shape.scaling:
        return plain_F / shape.scaling["factors"], 1.0
    if shape.kind == "default":
        return plain_F, 1.0
    if shape.kind == "linear":
        return plain_F / float(shape.scaling["factor"]), 1.0
    if shape.kind == "llama3":
        return _llama3(plain_F, shape.scaling), 1.0
    if shape.kind == "yarn":
        return _yarn(plain_F, shape)
    if shape.kind == "longrope":
        return _longrope(plain_F, shape)
    if shape.kind == "proportional":
        rotated_pairs = int(shape.scaling.get("partial_rotary_factor", 1.0) * len(plain_F))
        rotated_F = torch.cat([plain_F[:rotated_pairs], torch.zeros(len(plain_F) - rotated_pairs)])
        return rotated_F / shape.scaling.get("factor", 1.0), 1.0
    if shape.kind == "dynamic":  # in the context that the configuration names nothing is scaled
        return plain_F, 1.0
    raise MismatchError("rope scaling", f"the reader does not support rotary scaling of kind {shape.kind!r}")


def _yarn(plain_F: Tensor, shape: LayerDimensions) -> tuple[Tensor, float]:
    """([F], the size of cosines and sines): a pair that turns `beta_fast` times in the original context stays, one that turns
    `beta_slow` times is slowed by `factor`, with a ramp between their places (YaRN).
    """
    scaling, factor = shape.scaling, float(shape.scaling["factor"])
    turns = (scaling.get("beta_fast", 32.0), scaling.get("beta_slow", 1.0))
    length = scaling["original_max_position_embeddings"]
    low, high = (shape.head_dim * math.log(length / (2 * math.pi * n)) / (2 * math.log(shape.theta)) for n in turns)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)
    ramp_F = (torch.arange(len(plain_F)).float() - low) / (high - low if high != low else 0.001)
    kept_F = 1.0 - ramp_F.clamp(0.0, 1.0)
    scaled_F = plain_F * kept_F + plain_F / factor * (1.0 - kept_F)
    if "attention_factor" in scaling:
        return scaled_F, float(scaling["attention_factor"])
    if factor <= 1.0:
        return scaled_F, 1.0
    both = scaling.get("mscale") and scaling.get("mscale_all_dim")
    over, under = (scaling["mscale"], scaling["mscale_all_dim"]) if both else (1.0, 0.0)
    return scaled_F, (0.1 * over * math.log(factor) + 1.0) / (0.1 * under * math.log(factor) + 1.0)


def _longrope(plain_F: Tensor, shape: LayerDimensions) -> tuple[Tensor, float]:
    """([F], the size of cosines and sines), with a divisor for each pair, of long contexts or of short ones (LongRoPE)."""
    scaling, length = shape.scaling, shape.scaling["original_max_position_embeddings"]
    divisors = scaling["long_factor"] if shape.max_positions > length else scaling["short_factor"]
    factor = scaling.get("factor", shape.max_positions / length)
    size = math.sqrt(1.0 + math.log(factor) / math.log(length)) if factor > 1.0 else 1.0
    return plain_F / torch.tensor(divisors), float(scaling.get("attention_factor", size))


def _llama3(plain_F: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend those between (Llama 3.1)."""
    factor, length = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    cycles_F = length * plain_F / (2 * torch.pi)
    share_F = ((cycles_F - low) / (high - low)).clamp(0.0, 1.0)
    return plain_F * (share_F + (1.0 - share_F) / factor)
