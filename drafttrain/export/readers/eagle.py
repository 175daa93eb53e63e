"""EAGLE-1 as vLLM, SGLang and LMDeploy read it: a layer without an input norm over [embedding; the target's post-norm state].

Shapes: c tokens of a text, N positions fed, H hidden.

SGLang's fc always has a bias. vLLM's has none, and with "bias": true in config.json it accepts nothing, without a word.
LMDeploy's has none either, and stops at one; it reads an embedding of the drafter's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.export.readers.layer import Cache, Layer, Shape
from drafttrain.export.readers.parts import Config, Engine, MismatchError, Point, Reading, Tensors, each

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "lmdeploy": "LlamaForCausalLM"}


def reader(stack: str) -> Callable[[Path, Engine, Sequence[Point]], Reading]:
    def read(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
        config, tensors = Config.of(directory), Tensors(directory)
        config.expect("architectures", [ARCHITECTURES[stack]], "architecture")
        config.expect("model_type", "llama", "architecture")
        config.expect("num_hidden_layers", 1, "config")
        config.expect("bias", False, "bias")
        shape, (vocab, width) = Shape.of(config), engine.embed.shape
        if config.get("vocab_size", "vocabulary") != vocab:
            raise MismatchError("vocabulary", f"vocab_size is {config.values['vocab_size']}, the target's is {vocab}")
        fc, bias = tensors.take("fc.weight", shape.width, 2 * width), None
        if stack == "lmdeploy":
            engine = replace(engine, embed=tensors.take("embed_tokens.weight", vocab, width, fails="vocabulary"))
        else:
            bias = tensors.take("fc.bias", shape.width)
        if stack == "vllm" and bias is not None and bool(bias.any()):
            raise MismatchError("bias", "fc.bias is not zero, and vLLM leaves it out")
        layer = Layer(tensors, "layers.0", shape, shape.width)
        tensors.finish()
        used = None if stack == "vllm" else bias
        return Reading(
            each(points, lambda point: _draft(layer, fc, used, engine, point)), shape.facts() | {"vocabulary": vocab}
        )

    return read


def _draft(layer: Layer, fc: Tensor, bias: Tensor | None, engine: Engine, point: Point) -> Tensor:
    cache, logits = Cache(layer), []
    token_N, state_NH, position_N = point.shifted, point.last(), torch.arange(len(point.text))
    for draft in point.drafts:
        joined_NH = F.linear(torch.cat([engine.embed[token_N], state_NH], -1), fc, bias)
        mixed_NH = joined_NH + cache.feed(joined_NH, position_N)
        state_NH = (mixed_NH + layer.mlp(mixed_NH))[-1:]
        logits.append(F.linear(state_NH, engine.head)[0])
        token_N, position_N = draft[None], position_N[-1:] + 1
    return torch.stack(logits)
