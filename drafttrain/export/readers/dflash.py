"""DFlash as serving stacks read it (the authors' layout), as transformers does (`MuseGlimmerAssistantModel`), and speculators.

Shapes: c tokens of a text, S slots of a block, H hidden.

The numbers of the layers are k - 1, but for speculators: state `id + 1` of `output_hidden_states`. The first of a block's S
slots holds the root and drafts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.export.readers.layer import Layer, Shape, rms
from drafttrain.export.readers.parts import Config, Engine, MismatchError, Point, Reading, Tensors, each


def lmdeploy(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    """The authors' layout, with the size of the blocks inside `dflash_config`; ids ascend."""
    config = Config.of(directory)
    inner = config.inside("dflash_config", "layer ids")
    inner.expect("block_size", config.get("block_size", "block size"), "block size")
    ids = inner.get("target_layer_ids", "layer ids")
    if ids != sorted(set(ids)):
        raise MismatchError("layer ids", f"target_layer_ids are {ids}, LMDeploy takes ascending ones")
    return zlab(directory, engine, points)


def zlab(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    config = Config.of(directory)
    config.expect("architectures", ["DFlashDraftModel"], "architecture")
    config.expect("model_type", "qwen3", "architecture")
    config.expect("num_target_layers", engine.blocks, "layer ids")
    config.expect("vocab_size", len(engine.embed), "vocabulary")
    return _read(directory, config, config.inside("dflash_config", "layer ids"), ("fc", "hidden_norm"), engine, points)


def transformers(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    """Without `layer_types` it would slide a window of 2048 over the context."""
    config = Config.of(directory)
    config.expect("architectures", ["MuseGlimmerAssistantModel"], "architecture")
    config.expect("model_type", "muse_glimmer_assistant", "architecture")
    return _read(directory, config, config, ("encoder.fc", "encoder.output_norm_enc"), engine, points)


def speculators(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    """The numbers of the layers are k. vLLM reads it too: with `sliding_window_non_causal` false it makes blocks causal."""
    config = Config.of(directory)
    config.expect("architectures", ["DFlashSpeculator"], "architecture")
    config.expect("speculators_model_type", "dflash", "architecture")
    config.expect("model_type", None, "architecture")
    config.get("speculators_version", "architecture")
    asked = config.inside("speculators_config", "architecture")
    asked.expect("algorithm", "dflash", "architecture")
    asked.inside("verifier", "architecture").get("name_or_path", "architecture")
    inner = config.inside("transformer_layer_config", "config")
    inner.expect("model_type", "qwen3", "architecture")
    for holder, key in ((config, "draft_vocab_size"), (inner, "vocab_size")):
        holder.expect(key, len(engine.embed), "vocabulary")
    config.expect("sample_from_anchor", False, "config")
    config.expect("sliding_window_non_causal", True, "config")
    count = inner.get("num_hidden_layers", "config")
    inner.expect("layer_types", ["full_attention"] * count, "layer types")
    taken = list(config.get("aux_hidden_state_layer_ids", "layer ids"))
    size, mask = config.get("block_size", "block size"), config.get("mask_token_id", "mask token")
    return reading(Block(Shape.of(inner), count, taken, size, mask), Tensors(directory), ("fc", "hidden_norm"), engine, points)


def _read(
    directory: Path, config: Config, own: Config, names: tuple[str, str], engine: Engine, points: Sequence[Point]
) -> Reading:
    """own: where the layers and the mask token stand. names: of the map of the context and of its norm."""
    count = config.get("num_hidden_layers", "config")
    config.expect("layer_types", ["full_attention"] * count, "layer types")
    block = Block(
        Shape.of(config),
        count,
        [number + 1 for number in own.get("target_layer_ids", "layer ids")],
        config.get("block_size", "block size"),
        own.get("mask_token_id", "mask token"),
    )
    return reading(block, Tensors(directory), names, engine, points)


@dataclass(frozen=True, slots=True)
class Block:
    """What is read, beside the tensors. layers: how many; taken: the states, by k; size: of a block, its root included."""

    shape: Shape
    layers: int
    taken: list[int]
    size: int
    mask: int


def reading(block: Block, tensors: Tensors, names: tuple[str, str], engine: Engine, points: Sequence[Point]) -> Reading:
    shape, taken, mask, target_width = block.shape, block.taken, block.mask, engine.embed.shape[1]
    fc = tensors.take(f"{names[0]}.weight", shape.width, len(taken) * target_width, fails="layer ids")
    context_norm, norm = tensors.take(f"{names[1]}.weight", shape.width), tensors.take("norm.weight", shape.width)
    layers = [
        (
            Layer(tensors, f"layers.{i}", shape, shape.width, norms=True),
            tensors.take(f"layers.{i}.input_layernorm.weight", shape.width),
        )
        for i in range(block.layers)
    ]
    tensors.finish()
    if not 0 <= mask < len(engine.embed):
        raise MismatchError("mask token", f"mask_token_id {mask} is no token of the target")

    def draft(point: Point) -> Tensor:
        context_cH = rms(F.linear(torch.cat([point.layer(k) for k in taken], -1), fc), context_norm, shape.eps)
        token_S = torch.cat([point.root[None], torch.full((block.size - 1,), mask)])
        x_SH = engine.embed[token_S]
        for layer, input_norm in layers:
            x_SH = _layer(layer, rms(x_SH, input_norm, shape.eps), x_SH, context_cH)
        return F.linear(rms(x_SH, norm, shape.eps)[1:], engine.head)

    facts = shape.facts() | {"layer ids": taken, "block size": block.size, "mask token": mask}
    return Reading(each(points, draft), facts)


def _layer(layer: Layer, normed_SH: Tensor, x_SH: Tensor, context_cH: Tensor) -> Tensor:
    """Every slot sees the whole context and the whole block."""
    S, c = len(x_SH), len(context_cH)
    position_S, position_P = torch.arange(c, c + S), torch.arange(c + S)
    beside_PH = torch.cat([context_cH, normed_SH])
    q_ShD = layer.heads(normed_SH, "q", position_S)
    k_PhD, v_PhD = (layer.heads(beside_PH, which, position_P) for which in "kv")
    x_SH = x_SH + layer.attended(q_ShD, k_PhD, v_PhD, torch.ones(S, c + S, dtype=torch.bool))
    return x_SH + layer.mlp(x_SH)
