"""Medusa heads as vLLM up to 0.32 and text-generation-inference read them.

Shapes: K heads, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.parts import Config, Linear, MismatchError, Point, Reading, TargetParts, Tensors, each

Head = tuple[list[Linear], Tensor]  # residual blocks, output matrix


def vllm(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """`medusa_fc_bias`: whether the blocks have biases. `truncated_vocab_size`: number of tokens that the heads draft."""
    config, tensors = Config.of(directory), Tensors(directory)
    config.expect("architectures", ["MedusaModel"], "architecture")
    config.expect("model_type", "medusa", "architecture")
    config.expect("medusa_fc_bias", True, "bias")
    vocab, width = target.head.shape
    for key in ("vocab_size", "truncated_vocab_size"):
        config.expect(key, vocab, "vocabulary")
    config.expect("hidden_size", width, "config")
    count, layers = config.get("num_heads", "config"), config.get("num_hidden_layers", "config")
    heads = [
        (
            [tensors.linear(f"blocks.{i}.layers.{j}", width, width) for j in range(layers)],
            tensors.take(f"lm_heads.{i}.weight", vocab, width, fails="vocabulary"),
        )
        for i in range(count)
    ]
    tensors.finish()
    return _reading(heads, vocab, points)


def official(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """The authors' names. text-generation-inference takes a directory with `architectures` for a whole model."""
    config, tensors = Config.of(directory), Tensors(directory, "medusa_lm_head.safetensors")
    if "architectures" in config.values:
        raise MismatchError("architecture", "config.json has architectures, so it would be read as a whole model")
    config.get("base_model_name_or_path", "config")
    vocab, width = target.head.shape
    layers, heads = config.get("medusa_num_layers", "config"), list[Head]()
    for i in range(config.get("medusa_num_heads", "config")):
        blocks = [tensors.linear(f"{i}.{j}.linear", width, width) for j in range(layers)]
        heads.append((blocks, tensors.take(f"{i}.{layers}.weight", vocab, width, fails="vocabulary")))
    tensors.finish()
    return _reading(heads, vocab, points)


def _reading(heads: list[Head], vocab: int, points: Sequence[Point]) -> Reading:
    facts: dict[str, Any] = {"vocabulary": vocab, "heads of the drafter": len(heads)}
    return Reading(each(points, lambda point: torch.stack([_logits(head, point.last()[-1]) for head in heads])), facts)


def _logits(head: Head, x_H: Tensor) -> Tensor:
    blocks, output = head
    for weight, bias in blocks:
        x_H = x_H + F.silu(F.linear(x_H, weight, bias))
    return F.linear(x_H, output)
