"""DFlash as read by serving stacks (the authors' layout), by transformers (`MuseGlimmerAssistantModel`) and by speculators.

Shapes: c tokens of a text, S slots of a block, H hidden.

The layer ids are k - 1, except in speculators: state `id + 1` of `output_hidden_states`. The first of a block's S slots holds
the root and drafts nothing.

Whether slots see later slots: vLLM takes `is_causal` for all layers, else `dflash_config.causal`; SGLang and the authors' code
only `is_causal`.
Without these, layers with a window are causal, and the others not. Other stacks are not known to read such a key.

vLLM alone reads attention sinks, of all layers, where `dflash_config.attention_sink_bias` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.layer import Layer, LayerDimensions, rms
from tests.export_oracles.parts import (
    Config,
    MismatchError,
    Point,
    Reading,
    TargetParts,
    Tensors,
    each,
    over_target,
    speculators_layers,
)

Reader = Callable[[Path, TargetParts, Sequence[Point]], Reading]


def lmdeploy(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """The authors' layout, with the block size in `dflash_config` and ascending ids."""
    config = Config.of(directory)
    inner = config.inside("dflash_config", "layer ids")
    inner.expect("block_size", config.get("block_size", "block size"), "block size")
    ids = inner.get("target_layer_ids", "layer ids")
    if ids != sorted(set(ids)):
        raise MismatchError("layer ids", f"target_layer_ids are {ids}, but LMDeploy takes ascending ones")
    return zlab("lmdeploy")(directory, target, points)


def zlab(stack: str) -> Reader:
    """The authors' layout, as this stack reads it."""

    def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
        _, _, block = of_zlab(directory, "DFlashDraftModel", target, stack)
        return reading(block, Tensors(directory), ("fc", "hidden_norm"), target, points)

    return read


def of_zlab(directory: Path, architecture: str, target: TargetParts, stack: str) -> tuple[Config, Config, DraftBlockShape]:
    """A configuration, its `dflash_config`, and the block. Slots are in place: vLLM refuses others in this layout."""
    config = Config.of(directory)
    own = config.inside("dflash_config", "layer ids")
    check_raw(config, architecture, target)
    check_vocabulary(config, Tensors(directory))
    if config.values.get("sample_from_anchor"):
        raise MismatchError("config", "sample_from_anchor is true, which loaders of this layout refuse or ignore")
    block = raw_block(config, own, causal_of(config, own, "sglang" if stack == "official" else stack))
    return config, own, with_sinks(block, own) if stack == "vllm" else block


def with_sinks(block: DraftBlockShape, own: Config) -> DraftBlockShape:
    """The block as vLLM reads it. own: the configuration's `dflash_config`."""
    return replace(block, shape=replace(block.shape, sinks=bool(own.values.get("attention_sink_bias"))))


def check_raw(config: Config, architecture: str, target: TargetParts) -> None:
    """Raises MismatchError unless a configuration without speculators' fields names this architecture and target."""
    config.expect("architectures", [architecture], "architecture")
    config.expect("model_type", "qwen3", "architecture")
    config.expect("num_target_layers", target.blocks, "layer ids")
    config.expect("vocab_size", len(target.embed), "vocabulary")


def causal_of(config: Config, own: Config, stack: str) -> bool | None:
    """The flag of all layers that this stack finds; None where it finds none. own: the configuration's `dflash_config`."""
    top, inner = config.values.get("is_causal"), own.values.get("causal")
    if stack not in ("vllm", "sglang"):
        if top or inner or any(kind != "full_attention" for kind in config.values.get("layer_types") or ()):
            raise MismatchError("config", f"slots see no later slots in some layers, and {stack} reads no such key")
        return None
    found = inner if stack == "vllm" and top is None else top
    return None if found is None else bool(found)


def transformers(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """Without `layer_types` transformers would use a sliding window of 2048. Its window counts the positions to either side.

    It embeds and scores by the target's own modules.
    """
    config = Config.of(directory)
    if target.modules is not None:
        embed_VH, bias_V = target.modules()
        target = replace(target, embed=embed_VH, bias=bias_V)
    if config.values.get("sliding_window") is not None:
        config = Config(config.values | {"sliding_window": config.values["sliding_window"] + 1}, config.where)
    config.expect("architectures", ["MuseGlimmerAssistantModel"], "architecture")
    config.expect("model_type", "muse_glimmer_assistant", "architecture")
    block, names = raw_block(config, config, causal=False), ("encoder.fc", "encoder.output_norm_enc")
    return reading(block, Tensors(directory), names, target, points)


def speculators(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """speculators' layout."""
    config, block = of_speculators(directory, "dflash", "DFlashSpeculator", target)
    config.expect("sample_from_anchor", False, "config")
    return reading(block, Tensors(directory), ("fc", "hidden_norm"), target, points)


def of_speculators(
    directory: Path, algorithm: str, architecture: str, target: TargetParts, per_layer: bool = False
) -> tuple[Config, DraftBlockShape]:
    """A configuration and its block. Layer ids are k. vLLM reads it too. It makes blocks causal in all layers unless
    sliding_window_non_causal. per_layer: it takes layers with a window as causal, and the others not.
    """
    config = Config.of(directory)
    inner = speculators_layers(config, algorithm, architecture, "qwen3")
    inner.expect("vocab_size", len(target.embed), "vocabulary")
    check_vocabulary(config, Tensors(directory), len(target.embed))
    count, shape = inner.get("num_hidden_layers", "config"), LayerDimensions.of(inner)
    _expect_kinds(inner, shape, count)
    causal = not config.get("sliding_window_non_causal", "config")
    if per_layer:
        config.expect("sliding_window_non_causal", not any(shape.windows), "config")
    elif causal and not (shape.windows and all(shape.windows)):
        raise MismatchError("config", "sliding_window_non_causal is false, and layers without a window would be causal too")
    taken = list(config.get("aux_hidden_state_layer_ids", "layer ids"))
    size, mask = config.get("block_size", "block size"), config.get("mask_token_id", "mask token")
    return config, DraftBlockShape(shape, count, taken, size, mask, first_slot(config), causal=None if per_layer else causal)


def first_slot(config: Config) -> int:
    """The first slot that drafts. Loaders have different defaults, so the field must be there."""
    return 0 if config.get("sample_from_anchor", "config") else 1


def raw_block(config: Config, own: Config, causal: bool | None, first: int = 1) -> DraftBlockShape:
    """own: holds the layer ids and the mask token. causal: as in `DraftBlockShape`."""
    count, shape = config.get("num_hidden_layers", "config"), LayerDimensions.of(config)
    _expect_kinds(config, shape, count)
    return DraftBlockShape(
        shape,
        count,
        [number + 1 for number in own.get("target_layer_ids", "layer ids")],
        config.get("block_size", "block size"),
        own.get("mask_token_id", "mask token"),
        first,
        causal=causal,
    )


def _expect_kinds(config: Config, shape: LayerDimensions, count: int) -> None:
    """Raises MismatchError unless the layers' kinds of attention are written and fit together."""
    if not shape.windows:
        config.expect("layer_types", ["full_attention"] * count, "layer types")
        return
    config.expect("use_sliding_window", True, "layer types")
    if len(shape.windows) != count or not set(config.values["layer_types"]) <= {"full_attention", "sliding_attention"}:
        raise MismatchError("layer types", f"layer_types is {config.values['layer_types']} for {count} layers")


@dataclass(frozen=True, slots=True)
class DraftBlockShape:
    """The shape of a block drafter."""

    shape: LayerDimensions
    layers: int  # number of layers
    taken: list[int]  # the states that are read, by k
    size: int  # slots of a block, with the root
    mask: int  # the mask token
    first: int = 1  # first slot that drafts
    group: int | None = None  # channels per kernel of the convolutions; None: there are none
    causal: bool | None = None  # slots of all layers see no later slot; None: those of layers with a window

    def causal_at(self, number: int) -> bool:
        """Whether slots of this layer see no later slot."""
        if self.causal is not None:
            return self.causal
        return bool(self.shape.windows) and self.shape.windows[number] is not None

    def facts(self) -> dict[str, Any]:
        """The settings that the files have."""
        return self.shape.facts() | {
            "layer ids": self.taken,
            "block size": self.size,
            "mask token": self.mask,
            "causal layers": [self.causal_at(i) for i in range(self.layers)],
            "slots": "in_place" if self.first else "shifted",
        }


def reading(
    block: DraftBlockShape, tensors: Tensors, names: tuple[str, str], target: TargetParts, points: Sequence[Point]
) -> Reading:
    """Draft with the target's head from the states of a block."""
    states, (head, bias, ids) = slots(block, tensors, names, target), head_of(tensors, target)
    tensors.finish()

    def draft(point: Point) -> Tensor:
        return over_target(F.linear(states(point), head, bias), ids, len(target.embed))

    return Reading(each(points, draft), block.facts() | {"d2t": ids.tolist()})


def check_vocabulary(config: Config, tensors: Tensors, default: int | None = None) -> None:
    """Raises MismatchError unless the number of draft tokens is that of `d2t`. default: without one; None: it is not said."""
    size = len(tensors.left["d2t"]) if "d2t" in tensors.left else default
    config.expect("draft_vocab_size", size, "vocabulary")


def head_of(tensors: Tensors, target: TargetParts) -> tuple[Tensor, Tensor | None, Tensor]:
    """(matrix, bias, target ids of its rows) of the drafter's own head, if the files have a d2t, else of the target's."""
    vocab = len(target.embed)
    if "d2t" not in tensors.left:
        return target.head, target.bias, torch.arange(vocab)
    ids = tensors.take("d2t", -1)
    ids = ids + torch.arange(len(ids))
    known = tensors.take("t2d", vocab, fails="d2t")
    if known.dtype != torch.bool or int(known.sum()) != len(ids) or not bool(known[ids.clamp(0, vocab - 1)].all()):
        raise MismatchError("d2t", "as offsets its values lead to other tokens than t2d marks")
    return tensors.take("lm_head.weight", len(ids), target.embed.shape[1], fails="vocabulary"), None, ids


def slots(block: DraftBlockShape, tensors: Tensors, names: tuple[str, str], target: TargetParts) -> Callable[[Point], Tensor]:
    """[K, H] of a point: the states of the slots that draft."""
    shape, taken, mask, target_width = block.shape, block.taken, block.mask, target.embed.shape[1]
    fc = tensors.take(f"{names[0]}.weight", shape.width, len(taken) * target_width, fails="layer ids")
    context_norm, norm = tensors.take(f"{names[1]}.weight", shape.width), tensors.take("norm.weight", shape.width)
    layers = [_OneLayer(tensors, i, block) for i in range(block.layers)]
    if not 0 <= mask < len(target.embed):
        raise MismatchError("mask token", f"mask_token_id {mask} is no token of the target")

    def states(point: Point) -> Tensor:
        context_cH = rms(F.linear(torch.cat([point.layer(k) for k in taken], -1), fc), context_norm, shape.eps)
        x_SH = target.embed[torch.cat([point.root[None], torch.full((block.size - 1,), mask)])]
        for layer in layers:
            x_SH = layer(x_SH, context_cH)
        return rms(x_SH, norm, shape.eps)[block.first :]

    return states


def tokens_before(point: Point, drafts: int) -> Tensor:
    """[K] the token before each draft. Past the point's drafts, where a wrong file has more slots, it is the root."""
    before_K = torch.cat([point.root[None], point.drafts[:-1]])[:drafts]
    return torch.cat([before_K, point.root.expand(drafts - len(before_K))])


class _OneLayer:
    """A layer in which every slot sees the context and the block, or of the block only what is not later; with a window only
    what is within it."""

    def __init__(self, tensors: Tensors, number: int, block: DraftBlockShape) -> None:
        shape, name = block.shape, f"layers.{number}"
        self.inner, self.eps = Layer(tensors, name, shape, shape.width, norms=True, number=number), shape.eps
        self.causal = block.causal_at(number)
        self.norm = tensors.take(f"{name}.input_layernorm.weight", shape.width)
        self.attention, self.mlp = (
            None if block.group is None else _Convolution(tensors, f"{name}.{part}_conv", shape.width, block.group)
            for part in ("attention", "mlp")
        )

    def __call__(self, x_SH: Tensor, context_cH: Tensor) -> Tensor:
        x_SH = x_SH + _around(self.attention, rms(x_SH, self.norm, self.eps), lambda in_SH: self._attended(in_SH, context_cH))
        normed_SH = rms(x_SH, self.inner.post, self.eps)
        return x_SH + _around(self.mlp, normed_SH, self.inner.gated)

    def _attended(self, in_SH: Tensor, context_cH: Tensor) -> Tensor:
        S, c = len(in_SH), len(context_cH)
        position_S, position_P = torch.arange(c, c + S), torch.arange(c + S)
        joined_PH = torch.cat([context_cH, in_SH])
        q_ShD = self.inner.heads(in_SH, "q", position_S)
        k_PhD, v_PhD = (self.inner.heads(joined_PH, which, position_P) for which in "kv")
        back_SP = position_S[:, None] - position_P
        seen_SP = (back_SP >= 0) | (not self.causal)
        if self.inner.window is not None:
            seen_SP &= back_SP < self.inner.window
        return self.inner.attended(q_ShD, k_PhD, v_PhD, seen_SP)


class _Convolution:
    """A convolution of two taps before a part and one after it. Each slot's own kernel comes from the part's input."""

    def __init__(self, tensors: Tensors, name: str, width: int, group: int) -> None:
        self.base_2kH = tensors.take(f"{name}.base_kernel", 2, 2, width)
        self.own = tensors.take(f"{name}.kernel_projection.weight", 4 * (width // group), width, fails="config")
        self.group = group

    def __call__(self, x_SH: Tensor, side: int, input_SH: Tensor) -> Tensor:
        own_SkH = F.linear(input_SH, self.own).view(len(input_SH), 2, 2, -1)[:, side].repeat_interleave(self.group, -1)
        out = []
        for slot in range(len(x_SH)):
            mixed_H = (self.base_2kH[side, 0] + own_SkH[slot, 0]) * x_SH[slot]
            if slot:
                mixed_H = mixed_H + (self.base_2kH[side, 1] + own_SkH[slot, 1]) * x_SH[slot - 1]
            out.append(mixed_H)
        return torch.stack(out)


def _around(convolution: _Convolution | None, x_SH: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    if convolution is None:
        return part(x_SH)
    return convolution(part(convolution(x_SH, 0, x_SH)), 1, x_SH)
