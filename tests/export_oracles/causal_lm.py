"""The directory of an ordinary causal language model: Llama, Mistral, Qwen2 and Qwen3.

A sliding window, if there is one, is wider than the texts that are read here.

Shapes: N positions fed, V vocabulary, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.layer import Cache, Layer, LayerDimensions, rms
from tests.export_oracles.parts import Config, MismatchError, Point, Reading, TargetParts, Tensors, each

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """Read a model with its tokenizer."""
    check_tokenizer(directory, target.pieces)
    return _model(Config.of(directory), Tensors(directory), target, points)


def parallel(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """PARD: all drafts of one pass, from masks after the root."""
    check_tokenizer(directory, target.pieces)
    config = Config.of(directory)
    mask = config.get("pard_token", "mask token")
    if not 0 <= mask < len(target.embed):
        raise MismatchError("mask token", f"pard_token {mask} is no token of the target")
    found = _model(config, Tensors(directory), target, points, mask)
    return replace(found, facts=found.facts | {"mask token": mask})


def adapter(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """A peft adapter. Its matrices' products are added to the weights of its base, in a directory inside or elsewhere."""
    check_tokenizer(directory, target.pieces)
    config, matrices = Config.of(directory, "adapter_config.json"), Tensors(directory, "adapter_model.safetensors")
    base = directory / "base" if (directory / "base").is_dir() else target.base
    if base is None:
        raise MismatchError("tensors", "the adapter's base model is missing")
    tensors = Tensors(base)
    add_matrices(config, matrices, tensors)
    return _model(Config.of(base), tensors, target, points)


def add_matrices(config: Config, matrices: Tensors, tensors: Tensors) -> None:
    """Add a peft adapter's products to its model's weights. Raises MismatchError for what does not fit together."""
    config.expect("peft_type", "LORA", "architecture")
    config.expect("task_type", "CAUSAL_LM", "architecture")
    for key, value in (("bias", "none"), ("use_rslora", False), ("use_dora", False), ("fan_in_fan_out", False)):
        config.expect(key, value, "config")
    rank = config.get("r", "config")
    scale = config.get("lora_alpha", "config") / rank
    first = [name for name in matrices.left if name.endswith(".lora_A.weight")]
    config.expect("target_modules", sorted({name.split(".")[-3] for name in first}), "config")
    for name in first:
        weight = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        if weight not in tensors.left:
            raise MismatchError("tensors", f"{name} is for a linear map that the model does not have")
        down, up = matrices.take(name, rank, -1), matrices.take(name.replace("lora_A", "lora_B"), -1, rank)
        tensors.left[weight] = tensors.left[weight] + scale * (up @ down)
    matrices.finish()


def _model(config: Config, tensors: Tensors, target: TargetParts, points: Sequence[Point], mask: int | None = None) -> Reading:
    plan = plan_of(config, len(target.embed))
    return reading(plan, tensors, target, points, tied=bool(config.values.get("tie_word_embeddings")), mask=mask)


def plan_of(config: Config, vocab: int) -> LayerPlan:
    """The layers that a configuration describes. Raises MismatchError for those that are not read here."""
    kind = config.get("model_type", "architecture")
    if kind not in MODEL_TYPES:
        raise MismatchError("architecture", f"model_type is {kind!r}; the reader knows {', '.join(MODEL_TYPES)}")
    config.expect("architectures", [MODEL_TYPES[kind]], "architecture")
    for key in ("mlp_bias", "attention_bias"):
        if config.values.get(key):
            raise MismatchError("bias", f"{key} is true, but the reader has no such biases")
    if kind == "qwen2":  # by definition its heads divide the width evenly
        config.values.setdefault("head_dim", config.get("hidden_size", "config") // config.get("num_attention_heads", "heads"))
    config.expect("vocab_size", vocab, "vocabulary")
    return LayerPlan(LayerDimensions.of(config), config.get("num_hidden_layers", "config"), kind == "qwen2", kind == "qwen3")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The layers of a decoder."""

    shape: LayerDimensions
    layers: int
    bias: bool  # of q, k and v
    norms: bool  # of each head's query and key


def reading(
    plan: LayerPlan, tensors: Tensors, target: TargetParts, points: Sequence[Point], tied: bool, mask: int | None = None
) -> Reading:
    """Draft with the model. mask: the token that replaces earlier drafts; None: the drafts themselves."""
    shape, vocab, width = plan.shape, len(target.embed), plan.shape.width
    embed = tensors.take("model.embed_tokens.weight", vocab, width, fails="vocabulary")
    layers = layers_of(plan, tensors)
    norm = tensors.take("model.norm.weight", width)
    head = embed if tied else tensors.take("lm_head.weight", vocab, width)
    tensors.finish()

    def draft(point: Point) -> Tensor:
        above = point.drafts[:-1] if mask is None else torch.full_like(point.drafts[:-1], mask)
        token_N = torch.cat([point.text, point.root[None], above])
        x_NH, position_N = embed[token_N], torch.arange(len(token_N))
        for layer, input_norm in layers:
            x_NH = x_NH + Cache(layer).feed(rms(x_NH, input_norm, shape.eps), position_N)
            x_NH = x_NH + layer.mlp(x_NH)
        return F.linear(rms(x_NH[-len(point.drafts) :], norm, shape.eps), head)

    return Reading(each(points, draft), shape.facts() | {"vocabulary": vocab})


def layers_of(plan: LayerPlan, tensors: Tensors) -> list[tuple[Layer, Tensor]]:
    """All layers with the norms of their inputs."""
    layers, width = [], plan.shape.width
    for i in range(plan.layers):
        name = f"model.layers.{i}"
        norm = tensors.take(f"{name}.input_layernorm.weight", width)
        layers.append((Layer(tensors, name, plan.shape, width, bias=plan.bias, norms=plan.norms, number=i), norm))
    return layers


def check_tokenizer(directory: Path, pieces: dict[str, int] | None) -> None:
    """Raises MismatchError unless tokenizer.json gives the target's pieces their ids. None: there is no tokenizer to check."""
    if pieces is None:
        return
    try:
        content: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        listed = content["model"]["vocab"]
        own = listed if isinstance(listed, dict) else {piece: i for i, (piece, _) in enumerate(listed)}
        own = own | {added["content"]: added["id"] for added in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MismatchError("tokenizer", f"tokenizer.json cannot be read ({error})") from error
    if own != pieces:
        other = next(piece for piece in {**own, **pieces} if own.get(piece) != pieces.get(piece))
        raise MismatchError("tokenizer", f"{other!r} is token {own.get(other)} there, the target's is {pieces.get(other)}")
