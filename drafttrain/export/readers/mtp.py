"""One MTP module as DeepSeek's checkpoints name it, and as speculators reads it.

Shapes: c tokens of a text, N positions fed, H hidden.

    DeepSeek       the block's own output goes to the next depth; the layer's number is that behind the target's last one
    speculators    a Qwen3 block, whose normed output goes to the next depth
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.export.readers.layer import Cache, Layer, Shape, rms
from drafttrain.export.readers.parts import Config, Engine, Point, Reading, Tensors, each


@dataclass(frozen=True, slots=True)
class Module:
    """normed: what goes to the next depth."""

    layer: Layer
    token_norm: Tensor
    hidden_norm: Tensor
    projection: Tensor
    input_norm: Tensor
    norm: Tensor
    normed: bool


def deepseek(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    config, tensors = Config.of(directory), Tensors(directory)
    config.expect("num_nextn_predict_layers", 1, "config")
    config.expect("num_hidden_layers", engine.blocks, "config")
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    queries = bool(config.get("use_qk_norm", "config"))
    return _reading(config, config, tensors, f"model.layers.{engine.blocks}", names, queries, False, engine, points)


def speculators(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    config, tensors = Config.of(directory), Tensors(directory)
    config.expect("architectures", ["MTPDraftModel"], "architecture")
    config.expect("speculators_model_type", "mtp", "architecture")
    config.expect("model_type", None, "architecture")
    config.get("speculators_version", "architecture")
    config.expect("num_nextn_predict_layers", 1, "config")
    asked = config.inside("speculators_config", "architecture")
    asked.expect("algorithm", "mtp", "architecture")
    asked.inside("verifier", "architecture").get("name_or_path", "architecture")
    inner = config.inside("transformer_layer_config", "config")
    inner.expect("model_type", "qwen3", "architecture")
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return _reading(config, inner, tensors, "mtp_layers.0", names, True, True, engine, points)


def _reading(
    config: Config, inner: Config, tensors: Tensors, prefix: str, names: tuple[str, str, str, str], queries: bool, normed: bool,
    engine: Engine, points: Sequence[Point],
) -> Reading:  # fmt: skip
    inner.expect("vocab_size", engine.embed.shape[0], "vocabulary")
    shape = Shape.of(inner)
    width, (token, hidden, projection, norm) = shape.width, (f"{prefix}.{name}.weight" for name in names)
    module = Module(
        Layer(tensors, prefix, shape, width, norms=queries),
        tensors.take(token, width),
        tensors.take(hidden, width),
        tensors.take(projection, width, 2 * width),
        tensors.take(f"{prefix}.input_layernorm.weight", width),
        tensors.take(norm, width),
        normed,
    )
    tensors.finish()
    facts = shape.facts() | {"vocabulary": engine.embed.shape[0]}
    return Reading(each(points, lambda point: _draft(module, engine, point)), facts)


def _draft(module: Module, engine: Engine, point: Point) -> Tensor:
    cache, logits, eps = Cache(module.layer), [], module.layer.shape.eps
    token_N, state_NH, position_N = point.shifted, point.last(), torch.arange(len(point.text))
    for draft in point.drafts:
        both = rms(engine.embed[token_N], module.token_norm, eps), rms(state_NH, module.hidden_norm, eps)
        joined_NH = F.linear(torch.cat(both, -1), module.projection)
        mixed_NH = joined_NH + cache.feed(rms(joined_NH, module.input_norm, eps), position_N)
        out_1H = (mixed_NH + module.layer.mlp(mixed_NH))[-1:]
        normed_1H = rms(out_1H, module.norm, eps)
        logits.append(F.linear(normed_1H, engine.head)[0])
        state_NH, token_N, position_N = normed_1H if module.normed else out_1H, draft[None], position_N[-1:] + 1
    return torch.stack(logits)
