"""Our own forward of the Llama family over transformers' weights, with joined projections and few operations per block.

Shapes: B rows, N new positions, P positions, I joined heads, D head width, H hidden.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.model.attention import AttentionMetadata, Heads, attend
from drafttrain.model.fused_blocks import Blocks, BlockWeights
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import recomputed
from drafttrain.model.masks import Documents
from drafttrain.model.target import Taps, TargetOut
from drafttrain.ops import library
from drafttrain.ops.gated import gated
from drafttrain.ops.linear import linear, pack
from drafttrain.ops.quantised import Quantised
from drafttrain.ops.rms_norm import norm
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.parallel import Part
from drafttrain.targets.shallow import check_first
from drafttrain.targets.substitute import merged

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PACKED_BYTES = 2**31  # largest weights that are packed: packing doubles them
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # rope types whose angles depend only on the position


def why_not(model: PreTrainedModel) -> str | None:
    """Why this model needs transformers' own forward; None if this runner computes the same."""
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
    """Linear maps with one input, computed as one product and packed where that is faster.

    Until `join`, each map is computed separately, as training needs.
    """

    def __init__(self, parts: list[nn.Linear]) -> None:
        self.parts = parts
        self.split()

    def split(self) -> None:
        """Compute the maps separately again."""
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.packed: Tensor | None = None
        self.quantised: Quantised | None = None

    def __call__(self, x_H: Tensor) -> Tensor:
        if self.quantised is not None:
            return self.quantised(x_H) if self.bias is None else self.quantised(x_H) + self.bias
        if self.weight is None:
            return self.parts[0](x_H) if len(self.parts) == 1 else torch.cat([part(x_H) for part in self.parts], -1)
        return linear(x_H, self.weight, self.bias, self.packed)

    def join(self, share: bool, packed: bool, bits: int | None = None) -> bool:
        """Join the parts' current weights. Returns whether they differ from those joined before.

        Unchanged weights stay in place and changed ones are written to the same memory, since a captured CUDA graph refers to
        that memory. share: the parts become views of the joined weight, so that it takes no extra memory. bits: quantise the
        joined weight.
        """
        # decoding may join first, in inference mode, and the joined tensors may have to be written later
        with torch.inference_mode(torch.is_inference_mode_enabled() and share), torch.no_grad():
            return self._joined(share, packed, bits)

    def _joined(self, share: bool, packed: bool, bits: int | None) -> bool:
        weights = [merged(part) for part in self.parts]
        biases = [part.bias.detach() for part in self.parts if part.bias is not None]
        changed = _update(self, "bias", biases)
        if bits is not None:
            return self._quantise(torch.cat(weights), bits) or changed
        if packed and not share and self.weight is None and weights[0].device.type == "cpu":
            weights[0] = weights[0].clone()  # a view would always equal the parameter, and its packed copy would become stale
        changed = _update(self, "weight", weights) or changed
        assert self.weight is not None
        if share and len(weights) > 1:
            for part, rows in zip(self.parts, self.weight.split([p.out_features for p in self.parts]), strict=True):
                part.weight.data = rows
        if packed and changed:
            self.packed = pack(self.weight)
        return changed

    def _quantise(self, weight_OI: Tensor, bits: int) -> bool:
        old, new = self.quantised, Quantised(weight_OI, bits)
        if old is None:
            self.quantised = new
            return True
        parts = [(getattr(old, name), getattr(new, name)) for name in ("code", "scale", "pairs") if hasattr(new, name)]
        changed = [not torch.equal(kept, part) for kept, part in parts]
        for kept, part in parts if any(changed) else ():
            kept.copy_(part)
        return any(changed)


def _update(joint: Joint, name: str, parts: list[Tensor]) -> bool:
    """Set the joint's tensor `name` to the concatenated parts. Returns whether it changed."""
    whole: Tensor | None = getattr(joint, name)
    if not parts:
        return False
    if whole is None or (whole.dtype, whole.device) != (parts[0].dtype, parts[0].device):
        setattr(joint, name, parts[0] if len(parts) == 1 else torch.cat(parts))
        return True
    rows = whole.split([len(part) for part in parts])
    if all(torch.equal(old, new) for old, new in zip(rows, parts, strict=True)):
        return False
    torch.cat(parts, out=whole)
    return True


class Block:
    """One decoder block: transformers' modules hold the weights, the order of operations is ours.

    part: this process's part of it, where the target is split.
    """

    def __init__(self, layer: Any, window: int | None, part: Part) -> None:
        self.part = part
        attention, mlp = layer.self_attn, layer.mlp
        width = attention.head_dim
        self.shape = Heads(
            heads=attention.q_proj.out_features // width,
            kv_heads=attention.k_proj.out_features // width,
            width=width,
            scale=attention.scaling,
            window=window,
            q_norm=getattr(attention, "q_norm", None),
            k_norm=getattr(attention, "k_norm", None),
        )
        self.qkv, self.gate_up = (
            Joint([attention.q_proj, attention.k_proj, attention.v_proj]),
            Joint([mlp.gate_proj, mlp.up_proj]),
        )
        self.out, self.down = Joint([attention.o_proj]), Joint([mlp.down_proj])
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm

    def forward(self, x_BNH: Tensor, delta_BNH: Tensor | None, step: AttentionMetadata, number: int) -> tuple[Tensor, Tensor]:
        """(x, delta): the block's output is their sum. The norm of the next block does the addition."""
        x_BNH, normed_BNH = norm(self.before, x_BNH, delta_BNH)
        mixed_BNI = attend(self.qkv(normed_BNH), step, number, self.shape)
        x_BNH, normed_BNH = norm(self.between, x_BNH, self.part.sum(self.out(mixed_BNI)))
        return x_BNH, self.part.sum(self.down(gated(self.gate_up(normed_BNH))))

    def weights(self) -> BlockWeights | None:
        """Joined and packed weights; None if they are not packed."""
        qkv, out, gate_up, down = (joint.packed for joint in self.joints)
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        return BlockWeights(
            self.before.weight,
            qkv,
            self.qkv.bias,
            out,
            self.out.bias,
            self.between.weight,
            gate_up,
            self.gate_up.bias,
            down,
            self.down.bias,
            self.shape,
        )

    @property
    def joints(self) -> tuple[Joint, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class FastTarget(HFTarget):
    """As HFTarget, for the architectures of `ARCHITECTURES`. Its probe compares it with transformers' own forward."""

    name = "fast"
    hooked = False  # transformers' forward stays unchanged, as the baseline
    captured = True
    recomputes = False
    joins = True

    def _prepare(self) -> None:
        config, backbone = self.model.config, self.backbone.module
        types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        slides = [types[i] == "sliding_attention" if types else window is not None for i in range(self.shape.blocks)]
        self._chain = [
            Block(layer, window if sliding else None, self.part) for layer, sliding in zip(backbone.layers, slides, strict=True)
        ]
        self._head = Joint([self.model.get_output_embeddings()])
        self._angles: tuple[Tensor, Tensor] | None = None
        self._blocks: Blocks | None = None
        if self.frozen:
            self._join(share=True)

    def _install_attention(self) -> bool:
        return True

    def _join(self, share: bool) -> None:
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        changed = [joint.join(share, size <= PACKED_BYTES, self.bits) for joint in self._joints]
        if not any(changed):
            return
        weights = [block.weights() for block in self._chain]
        whole = [w for w in weights if w is not None]
        if len(whole) == len(weights) and library.has_product() and self.part.size == 1:
            self._blocks = Blocks(whole, self._chain[0].before.variance_epsilon)

    def shallow(self, blocks: int) -> FastTarget:
        """The first blocks, shared with this target, joined and packed once for both."""
        check_first(self.shape.blocks, blocks)
        view = copy.copy(self)
        view.shape, view._chain = replace(self.shape, blocks=blocks), self._chain[:blocks]
        if self._blocks is not None:
            weights = [block.weights() for block in view._chain]
            view._blocks = Blocks([w for w in weights if w is not None], self._chain[0].before.variance_epsilon)
        return view

    def recompute(self) -> None:
        self.recomputes = True

    def free(self) -> None:
        self._blocks = None
        for joint in self._joints:
            joint.split()
        super().free()

    def train(self, mode: bool = True) -> FastTarget:
        super().train(mode)
        if mode and not self.frozen:
            self._blocks = None
            for joint in self._joints:
                joint.split()
        return self

    @property
    def _joints(self) -> list[Joint]:
        return [self._head, *(joint for block in self._chain for joint in block.joints)]

    def head(self, hidden_H: Tensor) -> Tensor:
        return self.part.joined(self._head(hidden_H), self.shape.vocab_size)

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        if not self.frozen and not self.training:  # a trained copy starts to decode
            self._join(share=False)
        kv = super().new_cache(slots, max_len, pages)
        kv.allocate(self.shape.kv_heads // self.part.size, self.shape.head_dim, self.dtype)
        return kv

    def _table(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all positions, [max_positions, D], from transformers' own rotary module."""
        if self._angles is None or self._angles[0].device != like.device or self._angles[0].dtype != like.dtype:
            with torch.inference_mode(False), torch.no_grad():  # a model may decode first and be trained afterwards
                position_1P = torch.arange(self.shape.max_positions, device=like.device)[None]
                cos_1PD, sin_1PD = self.backbone.module.rotary_emb(like, position_1P)
                sin_PD = sin_1PD[0].clone()
                sin_PD[:, : sin_PD.shape[-1] // 2] *= -1
                self._angles = (cos_1PD[0].clone(), sin_PD)
        return self._angles

    def forward(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        x_BNH, delta_BNH = self.embed(token_BN), None
        step = AttentionMetadata(kv, position_BN, ancestor_BNN, *self._table(x_BNH))
        hidden: dict[int, Tensor] = {}
        logits = logit_row_BR is None or logit_row_BR.shape[1] > 0 or taps.final
        last = self.shape.blocks - 1 if logits or kv is not None else max(taps.blocks, default=-1)
        if self._blocks is not None and step.compiled:
            x_BNH, delta_BNH, hidden = self._blocks.run(x_BNH, step, tuple(sorted(taps.blocks)))
            last = -1
        for number, block in enumerate(self._chain[: last + 1]):
            x_BNH, delta_BNH = recomputed(self.recomputes, block.forward, x_BNH, delta_BNH, step, number)
            if number in taps.blocks:
                x_BNH, delta_BNH = x_BNH + delta_BNH, None
                hidden[number] = x_BNH
        if not logits:
            return TargetOut(None, hidden)
        return self._output(norm(self.backbone.module.norm, x_BNH, delta_BNH)[1], hidden, taps, logit_row_BR)
