"""One MTP module under DeepSeek's names, or as speculators reads it.

Shapes: c tokens of a text, N positions fed, H hidden.

    DeepSeek       the next depth reads the block's own output; the layer's number is the one after the target's last
    speculators    a Qwen3 block; the next depth reads its normed output
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.layer import Cache, Layer, LayerDimensions, rms
from tests.export_oracles.parts import Config, Point, Reading, TargetParts, Tensors, each, speculators_layers


@dataclass(frozen=True, slots=True)
class MtpModule:
    """A loaded module."""

    layer: Layer
    token_norm: Tensor
    hidden_norm: Tensor
    projection: Tensor
    input_norm: Tensor
    norm: Tensor
    normed: bool  # the next depth reads the normed output


def deepseek(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """DeepSeek's names."""
    config, tensors = Config.of(directory), Tensors(directory)
    config.expect("num_nextn_predict_layers", 1, "config")
    config.expect("num_hidden_layers", target.blocks, "config")
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    queries = bool(config.get("use_qk_norm", "config"))
    return _reading(config, config, tensors, f"model.layers.{target.blocks}", names, queries, False, target, points)


def speculators(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """speculators' layout."""
    config, tensors = Config.of(directory), Tensors(directory)
    inner = speculators_layers(config, "mtp", "MTPDraftModel", "qwen3")
    config.expect("num_nextn_predict_layers", 1, "config")
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return _reading(config, inner, tensors, "mtp_layers.0", names, True, True, target, points)


def _reading(
    config: Config, inner: Config, tensors: Tensors, prefix: str, names: tuple[str, str, str, str], queries: bool, normed: bool,
    target: TargetParts, points: Sequence[Point],
) -> Reading:  # fmt: skip
    inner.expect("vocab_size", target.embed.shape[0], "vocabulary")
    shape = LayerDimensions.of(inner)
    width, (token, hidden, projection, norm) = shape.width, (f"{prefix}.{name}.weight" for name in names)
    module = MtpModule(
        Layer(tensors, prefix, shape, width, norms=queries),
        tensors.take(token, width),
        tensors.take(hidden, width),
        tensors.take(projection, width, 2 * width),
        tensors.take(f"{prefix}.input_layernorm.weight", width),
        tensors.take(norm, width),
        normed,
    )
    tensors.finish()
    facts = shape.facts() | {"vocabulary": target.embed.shape[0]}
    return Reading(each(points, lambda point: _draft(module, target, point)), facts)


def _draft(module: MtpModule, target: TargetParts, point: Point) -> Tensor:
    cache, logits, eps = Cache(module.layer), [], module.layer.shape.eps
    token_N, state_NH, position_N = point.shifted, point.last(), torch.arange(len(point.text))
    for draft in point.drafts:
        both = rms(target.embed[token_N], module.token_norm, eps), rms(state_NH, module.hidden_norm, eps)
        joined_NH = F.linear(torch.cat(both, -1), module.projection)
        mixed_NH = joined_NH + cache.feed(rms(joined_NH, module.input_norm, eps), position_N)
        out_1H = (mixed_NH + module.layer.mlp(mixed_NH))[-1:]
        normed_1H = rms(out_1H, module.norm, eps)
        logits.append(F.linear(normed_1H, target.head)[0])
        state_NH, token_N, position_N = normed_1H if module.normed else out_1H, draft[None], position_N[-1:] + 1
    return torch.stack(logits)
