"""Our own forward of Llama-like models over transformers' weights, with joined projections and few operations per block.

`ARCHITECTURES` says how the blocks of each one differ from Llama's. Mixtures of experts run transformers' own module.

Shapes: B rows, N new positions, P positions, D head width, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.decoding.graph_runner import why_waiting
from drafttrain.model.attention import AttentionMetadata
from drafttrain.model.decoder_block import LATENT, LLAMA, BlockKind, Blocks, DecoderBlock, has_experts, rotary_order
from drafttrain.model.drafter import FrozenRef
from drafttrain.model.joint import PACKED_BYTES, Extended, Joint
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import recomputed
from drafttrain.model.low_rank import LowRank
from drafttrain.model.masks import Documents
from drafttrain.model.target import Taps, TargetOut
from drafttrain.ops import library
from drafttrain.ops.rms_norm import CentredNorm, OffsetNorm, norm
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.quantised import QuantisedLinear, is_quantised
from drafttrain.targets.shallow import check_first

SANDWICH = BlockKind(
    after_attention="post_attention_layernorm",
    between="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    norm=OffsetNorm,
)
AFTER = BlockKind(
    before=None,
    after_attention="post_attention_layernorm",
    between=None,
    after_mlp="post_feedforward_layernorm",
    wide_head_norms=True,
)
ARCHITECTURES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), LLAMA),
    **dict.fromkeys(("Phi3ForCausalLM", "SeedOssForCausalLM"), LLAMA),
    **dict.fromkeys(("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"), LLAMA),
    **dict.fromkeys(("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"), BlockKind(interleaved=True)),
    "Gemma2ForCausalLM": SANDWICH,
    "Gemma3ForCausalLM": replace(SANDWICH, tables=True),
    "Olmo2ForCausalLM": AFTER,
    "Olmo3ForCausalLM": replace(AFTER, tables=True),
    "Exaone4ForCausalLM": replace(AFTER, wide_head_norms=False, rotated=("sliding_attention",)),
    "Cohere2ForCausalLM": BlockKind(
        between=None, parallel=True, norm=CentredNorm, interleaved=True, repeated=True, rotated=("sliding_attention",)
    ),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"), LATENT),
}
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # rope types whose angles depend only on the position
STILL = ""  # the table of layers that rotate nothing


def kind_of(model: PreTrainedModel) -> BlockKind:
    """The kind of the model's blocks. A checkpoint may have its rotary pairs in halves, where others have neighbours."""
    block_kind = ARCHITECTURES[type(model).__name__]
    return replace(block_kind, interleaved=bool(getattr(model.config, "rope_interleave", block_kind.interleaved)))


def runs(config: Any) -> bool:
    """Whether this runner knows the architecture that a configuration names."""
    return bool({*(getattr(config, "architectures", None) or ())} & ARCHITECTURES.keys())


def why_not(model: PreTrainedModel) -> str | None:
    """Why this model needs transformers' own forward; None if this runner computes the same."""
    config = model.config
    if type(model).__name__ not in ARCHITECTURES:
        return f"{type(model).__name__} is not one of {', '.join(ARCHITECTURES)}"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    block_kind = ARCHITECTURES[type(model).__name__]
    if any(isinstance(module, QuantisedLinear) for module in model.modules()):
        return "its weights are widened for each product"
    if block_kind.latent and is_quantised(model):
        return "its attention reads weights apart from their products, which FP8 does not allow"
    if block_kind == LLAMA and getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}"
    if block_kind.rotated == ("sliding_attention",) and config.sliding_window is None:
        return "its layers have no windows"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is bidirectional"
    rope = config.rope_parameters or {}
    rope_types = {
        (layer_rope or {}).get("rope_type", "default") for layer_rope in (rope.values() if block_kind.tables else [rope])
    }
    if dynamic_types := sorted(rope_types - set(STATIC_ROPE)):
        return f"its rope type {dynamic_types[0]} changes with the length"
    return None


def why_whole(model: PreTrainedModel) -> str | None:
    """Why the blocks of this model cannot be split over processes; None if they can."""
    layers: Any = model.base_model.layers
    if any(has_experts(layer.mlp) for layer in layers):
        return "its experts are not split"
    if ARCHITECTURES[type(model).__name__] != LLAMA or not hasattr(layers[0].self_attn, "q_proj"):
        return f"the blocks of {type(model).__name__} are not split"
    return None


class FastTarget(HFTarget):
    """As HFTarget, for the architectures of `ARCHITECTURES`. Its probe compares it with transformers' own forward."""

    name = "fast"
    hooked = False  # transformers' forward stays unchanged, as the baseline
    recomputes = False
    joins = True

    def _prepare(self) -> None:
        config, backbone = self.model.config, self.backbone.module
        self._prepare_ends()
        layer_types = getattr(config, "layer_types", None) or [None] * self.shape.blocks
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        is_sliding = [
            window is not None and layer_type in (None, "sliding_attention") for layer_type in layer_types[: self.shape.blocks]
        ]
        self._rotations = [self._rotation(layer_type) for layer_type in layer_types[: self.shape.blocks]]
        order_D = rotary_order(self.shape.head_dim, self._pairs(self._rotations[0]), self.kind.interleaved)
        self._chain = [
            DecoderBlock(layer, window if sliding else None, self.part.sum, self.kind, order_D if name != STILL else None)
            for layer, sliding, name in zip(backbone.layers, is_sliding, self._rotations, strict=True)
        ]
        self.generations = not any(is_sliding)
        self._angles: dict[str, tuple[Tensor, Tensor]] = {}
        self._blocks: Blocks | None = None
        if self.frozen:
            self._join(share=True)

    def _prepare_ends(self) -> None:
        """Set up what runs outside of the blocks."""
        self.kind = kind_of(self.model)
        self._last: FrozenRef[Any] = FrozenRef(self.kind.of(self.backbone.module, "norm"))
        self._head = Joint([self.model.get_output_embeddings()])

    @torch.no_grad()
    def _why_not_captured(self) -> str | None:
        """Only the modules of experts are transformers' own."""
        for experts in (block.experts for block in self._chain if block.experts is not None):
            x_BNH = next(experts.parameters()).new_zeros(1, 4, self.shape.hidden_size)
            experts(x_BNH)
            if (reason := why_waiting(partial(experts, x_BNH))) is not None:
                return reason
        return None

    def _rotation(self, layer_type: str | None) -> str:
        """The name of the table of angles of a layer of this type."""
        if self.kind.rotated is not None and layer_type not in self.kind.rotated:
            return STILL
        return str(layer_type) if self.kind.tables else "all"

    def _pairs(self, name: str) -> int:
        """How many pairs of values a table rotates."""
        rotary = self.backbone.module.rotary_emb
        frequency: Tensor = getattr(rotary, f"{name}_inv_freq" if self.kind.tables else "inv_freq")
        return frequency.numel()

    def _install_attention(self) -> bool:
        return True

    def _join(self, share: bool) -> None:
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        rejoined = [joint.join(share, size <= PACKED_BYTES, self.bits) for joint in self._joints]
        if not any(rejoined):
            return
        weights = [block.weights() for block in self._chain]
        block_weights = [w for w in weights if w is not None]
        if len(block_weights) == len(weights) and library.has_product() and self.part.size == 1:
            self._blocks = Blocks(block_weights, self._chain[0].before.variance_epsilon)

    def shallow(self, blocks: int) -> FastTarget:
        """The first blocks, shared with this target, joined and packed once for both."""
        self.check_no_adapters()
        check_first(self.model, self.shape.blocks, blocks)
        view = copy.copy(self)
        view.shape, view._chain = replace(self.shape, blocks=blocks), self._chain[:blocks]
        view._rotations = self._rotations[:blocks]
        if self._blocks is not None:
            weights = [block.weights() for block in view._chain]
            view._blocks = Blocks([w for w in weights if w is not None], self._chain[0].before.variance_epsilon)
        return view

    def with_added(self, added: Mapping[str, LowRank]) -> FastTarget:
        """As `HFTarget.with_added`; the joined and packed weights are used where they are."""
        self.check_no_adapters()
        if self.part.size > 1:
            raise UserError(f"this drafter adds to the target's linear maps, and {self.shared_by} splits them; leave it out")
        added_by_id = {id(self.model.get_submodule(name)): low_rank for name, low_rank in added.items()}
        view = copy.copy(self)
        view._blocks, view._chain = None, [block.with_added(added_by_id) for block in self._chain]
        reachable_ids = {id(linear) for block in view._chain for joint in block.joints for linear in joint.parts}
        if unreachable := [name for name in added if id(self.model.get_submodule(name)) not in reachable_ids]:
            raise UserError(
                f"the fast runner computes {unreachable[0]} of {type(self.model).__name__} together with others, so nothing "
                "can be added to it; leave it out of drafter.lora_targets, or set target.runner=hf"
            )
        return view

    def refresh_added(self) -> None:
        for joint in self._joints:
            if isinstance(joint, Extended):
                joint.added.refresh()

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
        return self._scaled(self.part.joined(self._head(hidden_H), self.shape.vocab_size))

    def norm(self, hidden_H: Tensor) -> Tensor:
        return norm(self._last.module, hidden_H)[1]

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        if not self.frozen and not self.training:  # a trained copy starts to decode
            self._join(share=False)
        kv = super().new_cache(slots, max_len, pages)
        if (latent := self._chain[0].latent) is not None:
            kv.allocate(1, latent.cached, self.dtype, value_width=0)
        else:
            kv.allocate(self.shape.kv_heads // self.part.size, self.shape.head_dim, self.dtype)
        return kv

    def _table(self, like: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all positions, [max_positions, D], from transformers' own rotary module."""
        cos_sin = self._angles.get(name)
        if cos_sin is None or cos_sin[0].device != like.device or cos_sin[0].dtype != like.dtype:
            with torch.inference_mode(False), torch.no_grad():  # a model may decode first and be trained afterwards
                cos_sin = self._angles[name] = self._make_table(like, name)
        return cos_sin

    def _make_table(self, like: Tensor, name: str) -> tuple[Tensor, Tensor]:
        positions, half = self.shape.max_positions, self.shape.head_dim // 2
        pairs = 0 if name == STILL else self._pairs(name)
        cos_PD, sin_PD = like.new_ones(positions, 2 * half), like.new_zeros(positions, 2 * half)
        if pairs:
            position_1P = torch.arange(positions, device=like.device)[None]
            type_args = (name,) if self.kind.tables else ()
            cos_sin = self.backbone.module.rotary_emb(like, position_1P, *type_args)
            if isinstance(cos_sin, Tensor):  # complex numbers, one for each pair
                cos_sin = cos_sin.real, cos_sin.imag
            tables = (x_1PD[0, :, :: 2 if self.kind.repeated else 1] for x_1PD in cos_sin)
            for table_PD, rotary_PR in zip((cos_PD, sin_PD), tables, strict=True):
                table_PD[:, :pairs] = table_PD[:, half : half + pairs] = rotary_PR[:, :pairs]
        sin_PD[:, :half] *= -1
        return cos_PD, sin_PD

    def forward(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        self._check_taps(taps)
        x_BNH, delta_BNH = self.embed(token_BN), None
        past_length = ancestor_BNN.shape[2] - ancestor_BNN.shape[1] if isinstance(ancestor_BNN, Tensor) else 0
        steps = {
            name: AttentionMetadata(kv, position_BN, ancestor_BNN, *self._table(x_BNH, name), None, past_length)
            for name in dict.fromkeys(self._rotations)
        }
        hidden: dict[int, Tensor] = {}
        logits = logit_row_BR is None or logit_row_BR.shape[1] > 0 or taps.final
        last = self.shape.blocks - 1 if logits or kv is not None else max(taps.blocks, default=-1)
        step = steps[self._rotations[0]]
        if self._blocks is not None and step.compiled:
            x_BNH, delta_BNH, hidden = self._blocks.run(x_BNH, step, tuple(sorted(taps.blocks)))
            last = -1
        for number, block in enumerate(self._chain[: last + 1]):
            x_BNH, delta_BNH = recomputed(
                self.recomputes, block.forward, x_BNH, delta_BNH, steps[self._rotations[number]], number
            )
            if number in taps.blocks:
                x_BNH, delta_BNH = x_BNH + delta_BNH, None
                hidden[number] = x_BNH
        if not logits:
            return TargetOut(None, hidden)
        return self._output(norm(self._last.module, x_BNH, delta_BNH)[1], hidden, taps, logit_row_BR)
