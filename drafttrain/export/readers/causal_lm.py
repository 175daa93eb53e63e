"""An ordinary causal language model's directory: Llama, Mistral, Qwen2 and Qwen3.

A window of attention, where there is one, is wider than the texts that are read here.

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

from drafttrain.export.readers.layer import Cache, Layer, Shape, rms
from drafttrain.export.readers.parts import Config, Engine, MismatchError, Point, Reading, Tensors, each

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    if engine.pieces is not None:
        check_tokenizer(directory, engine.pieces)
    return _model(Config.of(directory), Tensors(directory), engine, points)


def parallel(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    """PARD: all drafts of one pass, from masks behind the root."""
    if engine.pieces is not None:
        check_tokenizer(directory, engine.pieces)
    config = Config.of(directory)
    mask = config.get("pard_token", "mask token")
    if not 0 <= mask < len(engine.embed):
        raise MismatchError("mask token", f"pard_token {mask} is no token of the target")
    found = _model(config, Tensors(directory), engine, points, mask)
    return replace(found, facts=found.facts | {"mask token": mask})


def adapter(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    """A peft adapter, whose matrices' products are added to the weights of its base: the directory inside, or elsewhere."""
    if engine.pieces is not None:
        check_tokenizer(directory, engine.pieces)
    config, matrices = Config.of(directory, "adapter_config.json"), Tensors(directory, "adapter_model.safetensors")
    config.expect("peft_type", "LORA", "architecture")
    config.expect("task_type", "CAUSAL_LM", "architecture")
    for key, value in (("bias", "none"), ("use_rslora", False), ("use_dora", False), ("fan_in_fan_out", False)):
        config.expect(key, value, "config")
    base = directory / "base" if (directory / "base").is_dir() else engine.base
    if base is None:
        raise MismatchError("tensors", "the model that the adapter is of is nowhere")
    rank = config.get("r", "config")
    tensors, scale = Tensors(base), config.get("lora_alpha", "config") / rank
    first = [name for name in matrices.left if name.endswith(".lora_A.weight")]
    config.expect("target_modules", sorted({name.split(".")[-3] for name in first}), "config")
    for name in first:
        weight = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        if weight not in tensors.left:
            raise MismatchError("tensors", f"{name} is of a map that the model has not")
        down, up = matrices.take(name, rank, -1), matrices.take(name.replace("lora_A", "lora_B"), -1, rank)
        tensors.left[weight] = tensors.left[weight] + scale * (up @ down)
    matrices.finish()
    return _model(Config.of(base), tensors, engine, points)


def _model(config: Config, tensors: Tensors, engine: Engine, points: Sequence[Point], mask: int | None = None) -> Reading:
    kind = config.get("model_type", "architecture")
    if kind not in MODEL_TYPES:
        raise MismatchError("architecture", f"model_type is {kind!r}; the reader knows {', '.join(MODEL_TYPES)}")
    config.expect("architectures", [MODEL_TYPES[kind]], "architecture")
    for key in ("mlp_bias", "attention_bias"):
        if config.values.get(key):
            raise MismatchError("bias", f"{key} is true, and the reader knows no such biases")
    if kind == "qwen2":  # its heads share the width evenly, by definition
        config.values.setdefault("head_dim", config.get("hidden_size", "config") // config.get("num_attention_heads", "heads"))
    shape, vocab = Shape.of(config), len(engine.embed)
    if config.get("vocab_size", "vocabulary") != vocab:
        raise MismatchError("vocabulary", f"vocab_size is {config.values['vocab_size']}, the target's is {vocab}")
    plan = Plan(shape, config.get("num_hidden_layers", "config"), kind == "qwen2", kind == "qwen3")
    return reading(plan, tensors, engine, points, tied=bool(config.values.get("tie_word_embeddings")), mask=mask)


@dataclass(frozen=True, slots=True)
class Plan:
    """A decoder's layers. bias: of q, k and v. norms: of each head's query and key."""

    shape: Shape
    layers: int
    bias: bool
    norms: bool


def reading(
    plan: Plan, tensors: Tensors, engine: Engine, points: Sequence[Point], tied: bool, mask: int | None = None
) -> Reading:
    """mask: what stands in the place of the drafts before; None: they themselves."""
    shape, vocab, width = plan.shape, len(engine.embed), plan.shape.width
    embed = tensors.take("model.embed_tokens.weight", vocab, width, fails="vocabulary")
    layers = []
    for i in range(plan.layers):
        name = f"model.layers.{i}"
        norm = tensors.take(f"{name}.input_layernorm.weight", width)
        layers.append((Layer(tensors, name, shape, width, bias=plan.bias, norms=plan.norms), norm))
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


def check_tokenizer(directory: Path, pieces: dict[str, int]) -> None:
    """Raises MismatchError unless tokenizer.json gives the target's pieces their ids."""
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
