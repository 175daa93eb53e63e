"""EAGLE-1 as vLLM, SGLang and LMDeploy read it: a layer without an input norm over [embedding; the target's post-norm state].

Shapes: c tokens of a text, N positions fed, H hidden.

SGLang's fc always has a bias. vLLM's has none, and with "bias": true in config.json vLLM silently accepts no drafts.
LMDeploy's has none either, and its loader fails if there is one. LMDeploy reads an embedding from the drafter's files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.layer import Cache, Layer, LayerDimensions
from tests.export_oracles.parts import Config, MismatchError, Point, Reading, TargetParts, Tensors, each

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "lmdeploy": "LlamaForCausalLM"}


def reader(stack: str) -> Callable[[Path, TargetParts, Sequence[Point]], Reading]:
    """The reader for this stack."""

    def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
        config, tensors = Config.of(directory), Tensors(directory)
        config.expect("architectures", [ARCHITECTURES[stack]], "architecture")
        config.expect("model_type", "llama", "architecture")
        config.expect("num_hidden_layers", 1, "config")
        config.expect("bias", False, "bias")
        shape, (vocab, width) = LayerDimensions.of(config), target.embed.shape
        config.expect("vocab_size", vocab, "vocabulary")
        fc, bias = tensors.take("fc.weight", shape.width, 2 * width), None
        if stack == "lmdeploy":
            target = replace(target, embed=tensors.take("embed_tokens.weight", vocab, width, fails="vocabulary"))
        else:
            bias = tensors.take("fc.bias", shape.width)
        if stack == "vllm" and bias is not None and bool(bias.any()):
            raise MismatchError("bias", "fc.bias is not zero, but vLLM ignores it")
        layer = Layer(tensors, "layers.0", shape, shape.width)
        tensors.finish()
        used = None if stack == "vllm" else bias
        return Reading(
            each(points, lambda point: _draft(layer, fc, used, target, point)), shape.facts() | {"vocabulary": vocab}
        )

    return read


def _draft(layer: Layer, fc: Tensor, bias: Tensor | None, target: TargetParts, point: Point) -> Tensor:
    cache, logits = Cache(layer), []
    token_N, state_NH, position_N = point.shifted, point.last(), torch.arange(len(point.text))
    for draft in point.drafts:
        joined_NH = F.linear(torch.cat([target.embed[token_N], state_NH], -1), fc, bias)
        mixed_NH = joined_NH + cache.feed(joined_NH, position_N)
        state_NH = (mixed_NH + layer.mlp(mixed_NH))[-1:]
        logits.append(F.linear(state_NH, target.head)[0])
        token_N, position_N = draft[None], position_N[-1:] + 1
    return torch.stack(logits)
