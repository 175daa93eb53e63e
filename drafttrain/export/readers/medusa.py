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

from drafttrain.export.readers.parts import Config, Linear, MismatchError, Point, Reading, TargetParts, Tensors, each

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


def official(stack: str) -> Callable[[Path, TargetParts, Sequence[Point]], Reading]:
    """The reader of the authors' layout for this stack.

    The authors' code repeats one block object, so of a head's blocks the last one's weights count for all.
    text-generation-inference takes a directory with `architectures` for a whole model.
    """

    def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
        config, tensors = Config.of(directory), Tensors(directory, "medusa_lm_head.safetensors")
        if stack == "tgi" and "architectures" in config.values:
            raise MismatchError("architecture", "config.json has architectures, so it would be read as a whole model")
        config.get("base_model_name_or_path", "config")
        vocab, width = target.head.shape
        layers, heads = config.get("medusa_num_layers", "config"), []
        for i in range(config.get("medusa_num_heads", "config")):
            blocks = [tensors.linear(f"{i}.{j}.linear", width, width) for j in range(layers)]
            output = tensors.take(f"{i}.{layers}.weight", vocab, width, fails="vocabulary")
            heads.append((blocks[-1:] * layers if stack == "official" else blocks, output))
        tensors.finish()
        return _reading(heads, vocab, points)

    return read


def _reading(heads: list[Head], vocab: int, points: Sequence[Point]) -> Reading:
    facts: dict[str, Any] = {"vocabulary": vocab, "heads of the drafter": len(heads)}
    return Reading(each(points, lambda point: torch.stack([_logits(head, point.last()[-1]) for head in heads])), facts)


def _logits(head: Head, x_H: Tensor) -> Tensor:
    blocks, output = head
    for weight, bias in blocks:
        x_H = x_H + F.silu(F.linear(x_H, weight, bias))
    return F.linear(x_H, output)
