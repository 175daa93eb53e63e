"""Medusa heads as vLLM up to 0.32, text-generation-inference and the authors' code read them.

Shapes: K heads, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.export.readers.parts import Config, Engine, MismatchError, Point, Reading, Tensors, each

Head = tuple[list[tuple[Tensor, Tensor]], Tensor]


def vllm(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    """`medusa_fc_bias` says whether the blocks have biases, `truncated_vocab_size` how many tokens the heads know."""
    config, tensors = Config.of(directory), Tensors(directory)
    config.expect("architectures", ["MedusaModel"], "architecture")
    config.expect("model_type", "medusa", "architecture")
    config.expect("medusa_fc_bias", True, "bias")
    vocab, width = engine.head.shape
    for key in ("vocab_size", "truncated_vocab_size"):
        config.expect(key, vocab, "vocabulary")
    config.expect("hidden_size", width, "config")
    count, layers = config.get("num_heads", "config"), config.get("num_hidden_layers", "config")
    heads = [
        (
            [_block(tensors, f"blocks.{i}.layers.{j}", width) for j in range(layers)],
            tensors.take(f"lm_heads.{i}.weight", vocab, width, fails="vocabulary"),
        )
        for i in range(count)
    ]
    tensors.finish()
    return _reading(heads, vocab, points)


def official(stack: str) -> Callable[[Path, Engine, Sequence[Point]], Reading]:
    """The authors' layout. Their own code repeats one block object: of several blocks of a head the last one's weights count
    for all. text-generation-inference takes a directory with `architectures` for a whole model.
    """

    def read(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
        config, tensors = Config.of(directory), Tensors(directory, "medusa_lm_head.safetensors")
        if stack == "tgi" and "architectures" in config.values:
            raise MismatchError("architecture", "config.json names architectures: it would be taken for a whole model")
        config.get("base_model_name_or_path", "config")
        vocab, width = engine.head.shape
        layers, heads = config.get("medusa_num_layers", "config"), []
        for i in range(config.get("medusa_num_heads", "config")):
            blocks = [_block(tensors, f"{i}.{j}.linear", width) for j in range(layers)]
            output = tensors.take(f"{i}.{layers}.weight", vocab, width, fails="vocabulary")
            heads.append((blocks[-1:] * layers if stack == "official" else blocks, output))
        tensors.finish()
        return _reading(heads, vocab, points)

    return read


def _block(tensors: Tensors, name: str, width: int) -> tuple[Tensor, Tensor]:
    return tensors.take(f"{name}.weight", width, width), tensors.take(f"{name}.bias", width)


def _reading(heads: list[Head], vocab: int, points: Sequence[Point]) -> Reading:
    facts: dict[str, Any] = {"vocabulary": vocab, "heads of the drafter": len(heads)}
    return Reading(each(points, lambda point: torch.stack([_logits(head, point.last()[-1]) for head in heads])), facts)


def _logits(head: Head, x_H: Tensor) -> Tensor:
    blocks, output = head
    for weight, bias in blocks:
        x_H = x_H + F.silu(F.linear(x_H, weight, bias))
    return F.linear(x_H, output)
