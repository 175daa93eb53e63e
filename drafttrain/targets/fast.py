"""Our own forward of the Llama family over transformers' weights: joined projections, few operations a block.

Shapes: B rows, N new positions, P cached + new positions, h heads, g query heads per KV head, D head width, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from drafttrain.kv import KVCache
from drafttrain.target import Taps, TargetOut
from drafttrain.targets.hf import HFTarget, additive, seen

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PACKED_FOR = 16  # rows that a weight is packed for
PACKED_BYTES = 2**31  # of weights at most: packing doubles them
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles that depend on the position alone


def why_not(model: PreTrainedModel) -> str | None:
    """Why this model needs transformers' own forward; None when this runner computes the same."""
    config = model.config
    if type(model).__name__ not in ARCHITECTURES:
        return f"{type(model).__name__} is not one of {', '.join(ARCHITECTURES)}"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind not in STATIC_ROPE:
        return f"its rope type {kind} changes with the length"
    return None


class Joint:
    """Linear maps of one input as one product. Until `join`, each is computed by itself, as training needs.

    On a CPU a float32 weight is also kept in oneDNN's order: a verification's few rows are then multiplied without
    packing the weight anew each time, which costs as much as the product, and hundreds of rows take half of MKL's time
    where the CPU is not Intel's (docs/log.md). One row is read faster as it is, and the packed product has no gradient.
    """

    def __init__(self, parts: list[nn.Linear]) -> None:
        self.parts = parts
        self.split()

    def split(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.packed: Tensor | None = None

    def __call__(self, x_H: Tensor) -> Tensor:
        if self.weight is None:
            return self.parts[0](x_H) if len(self.parts) == 1 else torch.cat([part(x_H) for part in self.parts], -1)
        if self.packed is not None and not x_H.requires_grad and x_H.numel() > x_H.shape[-1]:
            return torch.ops.mkldnn._linear_pointwise(x_H, self.packed, self.bias, "none", [], "")
        return F.linear(x_H, self.weight, self.bias)

    def join(self, share: bool, pack: bool) -> None:
        """share: the parts become views of the joined weight, so that it takes no memory of its own."""
        weights = [part.weight.detach() for part in self.parts]
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [part.bias.detach() for part in self.parts if part.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        if share and len(weights) > 1:
            for part, rows in zip(self.parts, self.weight.split([p.out_features for p in self.parts]), strict=True):
                part.weight.data = rows
        if pack:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_FOR)


class Block:
    """One decoder block: transformers' modules for the weights, our order of operations."""

    def __init__(self, layer: Any, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.window, self.head_dim, self.scale = window, attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv, self.gate_up = (
            Joint([attention.q_proj, attention.k_proj, attention.v_proj]),
            Joint([mlp.gate_proj, mlp.up_proj]),
        )
        self.out, self.down = Joint([attention.o_proj]), Joint([mlp.down_proj])
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)

    def forward(self, x_BNH: Tensor, angles: Angles, kv: KVCache | None, number: int, mask: Tensor | None) -> Tensor:
        B, N, H = x_BNH.shape
        mixed_BNhD = self.qkv(norm(self.before, x_BNH)).view(B, N, -1, self.head_dim)
        q_BNhD, k_BNhD, v_BNhD = mixed_BNhD.split([self.heads, self.kv_heads, self.kv_heads], 2)
        if self.q_norm is None or self.k_norm is None:
            turned = angles.turn(mixed_BNhD[:, :, : self.heads + self.kv_heads])
            q_BNhD, k_BNhD = turned.split([self.heads, self.kv_heads], 2)
        else:
            q_BNhD, k_BNhD = angles.turn(norm(self.q_norm, q_BNhD)), angles.turn(norm(self.k_norm, k_BNhD))
        attended_BNI = self._attend(q_BNhD, k_BNhD.transpose(1, 2), v_BNhD.transpose(1, 2), kv, number, mask)
        x_BNH = x_BNH + self.out(attended_BNI)
        gate, up = self.gate_up(norm(self.between, x_BNH)).chunk(2, -1)
        return x_BNH + self.down(F.silu(gate) * up)

    @property
    def joints(self) -> tuple[Joint, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def _attend(
        self, q_BNhD: Tensor, k_BhND: Tensor, v_BhND: Tensor, kv: KVCache | None, number: int, mask: Tensor | None
    ) -> Tensor:
        B, N, h, D = q_BNhD.shape
        if kv is None:
            mixed_BhND = F.scaled_dot_product_attention(
                q_BNhD.transpose(1, 2), k_BhND, v_BhND, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
            return mixed_BhND.transpose(1, 2).reshape(B, N, h * D)
        keys_BhPD, values_BhPD = kv.write(number, k_BhND, v_BhND)
        # the query heads of one KV head become rows of one attention: no key is repeated in memory
        groups = h // self.kv_heads
        rows_BhRD = q_BNhD.view(B, N, self.kv_heads, groups, D).permute(0, 2, 3, 1, 4).reshape(B, self.kv_heads, -1, D)
        mixed_BhRD = F.scaled_dot_product_attention(rows_BhRD, keys_BhPD, values_BhPD, mask, scale=self.scale)
        return mixed_BhRD.view(B, self.kv_heads, groups, N, D).permute(0, 3, 1, 2, 4).reshape(B, N, h * D)


class Angles:
    """Rotary cosines and sines of the step's positions, [B, N, 1, D]; the sines carry the sign of the half they meet."""

    def __init__(self, cos_PD: Tensor, sin_PD: Tensor, position_BN: Tensor) -> None:
        self.cos, self.sin = cos_PD[position_BN][:, :, None], sin_PD[position_BN][:, :, None]

    def turn(self, x_BNhD: Tensor) -> Tensor:
        return torch.addcmul(x_BNhD * self.cos, x_BNhD.roll(x_BNhD.shape[-1] // 2, -1), self.sin)


def norm(module: Any, x_H: Tensor) -> Tensor:
    if module.weight.requires_grad:  # trained, perhaps sharded: its own forward has DeepSpeed's hooks
        return module(x_H)
    return F.rms_norm(x_H, (x_H.shape[-1],), module.weight, module.variance_epsilon)


class FastTarget(HFTarget):
    """As HFTarget, for the architectures of `ARCHITECTURES`; its probe compares it with transformers' own forward."""

    name = "fast"

    def _prepare(self) -> None:
        config, backbone = self.model.config, self.backbone[0]
        types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        slides = [types[i] == "sliding_attention" if types else window is not None for i in range(self.shape.blocks)]
        self._chain = [
            Block(layer, window if sliding else None) for layer, sliding in zip(backbone.layers, slides, strict=True)
        ]
        self._head = Joint([self.model.get_output_embeddings()])
        self._windows = {block.window for block in self._chain}
        self._angles: tuple[Tensor, Tensor] | None = None
        if self.frozen:
            self._join(share=True)

    def _join(self, share: bool) -> None:
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        pack = self.device.type == "cpu" and self.dtype == torch.float32 and size <= PACKED_BYTES
        pack = pack and torch.backends.mkldnn.is_available()
        for joint in self._joints:
            joint.join(share, pack)

    def train(self, mode: bool = True) -> FastTarget:
        super().train(mode)
        if mode and not self.frozen:
            for joint in self._joints:
                joint.split()
        return self

    @property
    def _joints(self) -> list[Joint]:
        return [self._head, *(joint for block in self._chain for joint in block.joints)]

    def head(self, hidden_H: Tensor) -> Tensor:
        return self._head(hidden_H)

    def new_cache(self, slots: int, max_len: int) -> KVCache:
        if not self.frozen and not self.training:  # a trained copy that begins to decode
            self._join(share=False)
        return super().new_cache(slots, max_len)

    def _table(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all positions, [max_positions, D], by transformers' own rotary module."""
        if self._angles is None or self._angles[0].device != like.device or self._angles[0].dtype != like.dtype:
            position_1P = torch.arange(self.shape.max_positions, device=like.device)[None]
            cos_1PD, sin_1PD = self.backbone[0].rotary_emb(like, position_1P)
            sin_PD = sin_1PD[0].clone()
            sin_PD[:, : sin_PD.shape[-1] // 2] *= -1
            self._angles = (cos_1PD[0].clone(), sin_PD)
        return self._angles

    def forward(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        x_BNH = self.embed(token_BN)
        angles = Angles(*self._table(x_BNH), position_BN)
        masks = {w: self._seen(kv, ancestor_BNN, position_BN, w, x_BNH.dtype) for w in self._windows}
        hidden: dict[int, Tensor] = {}
        logits = logit_row_BR is None or logit_row_BR.shape[1] > 0 or taps.final
        last = self.shape.blocks - 1 if logits or kv is not None else max(taps.blocks, default=-1)
        for number, block in enumerate(self._chain[: last + 1]):
            x_BNH = block.forward(x_BNH, angles, kv, number, masks[block.window])
            if number in taps.blocks:
                hidden[number] = x_BNH
        if not logits:
            return TargetOut(None, hidden)
        return self._outcome(norm(self.backbone[0].norm, x_BNH), hidden, taps, logit_row_BR)

    def _seen(
        self, kv: KVCache | None, ancestor_BNN: Tensor | None, position_BN: Tensor, window: int | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Additive mask over each KV head's rows; None where everything before a position is seen."""
        N = position_BN.shape[1]
        if kv is None:
            if window is None or window >= N:
                return None
            apart_NN = torch.arange(N, device=position_BN.device)
            apart_NN = apart_NN[:, None] - apart_NN
            return additive(((apart_NN >= 0) & (apart_NN < window))[None], dtype)
        if N == 1 and kv.even and (window is None or kv.longest < window):
            return None
        groups = self.shape.heads // self.shape.kv_heads
        return additive(seen(kv, ancestor_BNN, position_BN, window).repeat(1, groups, 1), dtype)
