"""EAGLE-3 as serving stacks read it: the portable layout (`midlayer.*`), and that of speculators (`layers.0.*`).

Shapes: c tokens of a text, N positions fed, D draft vocabulary, V vocabulary, H hidden.

Where a stack finds the numbers of the layers, and what they mean there, differs; k is the input of block k:

    vLLM           top-level eagle_aux_hidden_state_layer_ids, k; without it its V1 runner takes the nested list as it is
    SGLang         eagle_config's eagle_aux_hidden_state_layer_ids + 1
    TensorRT-LLM   the same, named on its command line as eagle3_layers_to_capture
    OpenVINO       the same, put into the converted model as hidden_layers_list
    LMDeploy       none: 2, n // 2, n - 3
    speculators    eagle_aux_hidden_state_layer_ids, k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.export.readers.layer import Cache, Layer, Shape, rms
from drafttrain.export.readers.parts import Config, Engine, MismatchError, Point, Reading, Tensors, each, over_target

IDS = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = {"lmdeploy": "LlamaForCausalLM"}  # it puts the method's name before it


@dataclass(frozen=True, slots=True)
class Head:
    """One directory, loaded. before: the residual is the normed state; output: the normed state goes to the next step."""

    shape: Shape
    layer: Layer
    fc: Tensor
    fc_norms: list[Tensor]
    input_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor
    lm_head: Tensor
    ids: Tensor
    layers: list[int]
    before: bool
    output: bool


def portable(stack: str) -> Callable[[Path, Engine, Sequence[Point]], Reading]:
    """The reader of the portable layout as this stack takes it."""

    def read(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
        config, tensors = Config.of(directory), Tensors(directory)
        config.expect("architectures", [ARCHITECTURES.get(stack, "LlamaForCausalLMEagle3")], "architecture")
        config.expect("model_type", "llama", "architecture")
        nested = config.inside("eagle_config", "layer ids")
        nested.expect("use_aux_hidden_state", True, "layer ids")
        layers = _layers(stack, config, nested, engine.blocks)
        if len(layers) != 3:
            config.expect("num_aux_hidden_states", len(layers), "layer ids")
        if stack == "lmdeploy" and "d2t" not in tensors.left:
            raise MismatchError("d2t", "it is missing, and LMDeploy would draft token 0 alone")
        head = head_of(config, config, tensors, "midlayer", engine, layers)
        tensors.finish()
        if head.before and stack in ("sglang", "trtllm"):
            raise MismatchError("norm flags", f"norm_before_residual is true, which {stack} does not read")
        return reading(head, engine, points)

    return read


def speculators(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    """The library takes an embedding from the files; without one its own is memory as it was found."""
    config, tensors = Config.of(directory), Tensors(directory)
    inner = speculators_layer(config, "eagle3", "Eagle3Speculator", engine)
    engine = replace(engine, embed=tensors.take("embed_tokens.weight", *engine.embed.shape, fails="vocabulary"))
    head = head_of(config, inner, tensors, "layers.0", engine, config.get(IDS, "layer ids"))
    tensors.finish()
    return reading(head, engine, points)


def speculators_layer(config: Config, kind: str, architecture: str, engine: Engine) -> Config:
    """What a configuration of this type says of its layers."""
    config.expect("architectures", [architecture], "architecture")
    config.expect("speculators_model_type", kind, "architecture")
    config.expect("model_type", None, "architecture")
    config.get("speculators_version", "architecture")
    asked = config.inside("speculators_config", "architecture")
    asked.expect("algorithm", kind, "architecture")
    asked.inside("verifier", "architecture").get("name_or_path", "architecture")
    if config.get("target_hidden_size", "config") != engine.embed.shape[1]:
        raise MismatchError(
            "config", f"target_hidden_size is {config.values['target_hidden_size']}, not {engine.embed.shape[1]}"
        )
    inner = config.inside("transformer_layer_config", "config")
    inner.expect("model_type", "llama", "architecture")
    return inner


def _layers(stack: str, config: Config, nested: Config, blocks: int) -> list[int]:
    if stack == "lmdeploy":
        return [2, blocks // 2, blocks - 3]
    if stack == "vllm":
        return list(config.values.get(IDS) or nested.get(IDS, "layer ids"))
    return [number + 1 for number in nested.get(IDS, "layer ids")]


def head_of(config: Config, inner: Config, tensors: Tensors, prefix: str, engine: Engine, layers: list[int]) -> Head:
    """config: where the drafter's own fields stand; inner: those of its layer."""
    inner.expect("tie_word_embeddings", False, "config")  # stacks would take the embedding for the head
    shape, (vocab, target_width) = Shape.of(inner), engine.embed.shape
    if inner.get("vocab_size", "vocabulary") != vocab:
        raise MismatchError("vocabulary", f"vocab_size is {inner.values['vocab_size']}, the target's is {vocab}")
    spoken = config.get("draft_vocab_size", "vocabulary")
    ids = torch.arange(spoken)
    if spoken != vocab or "d2t" in tensors.left:
        ids = ids + tensors.take("d2t", spoken, fails="d2t")
        known = tensors.take("t2d", vocab, fails="d2t")
        if known.dtype != torch.bool or int(known.sum()) != spoken:
            raise MismatchError("d2t", f"t2d is {known.dtype} with {int(known.sum())} trues; bool with {spoken} are needed")
        if bool(((ids < 0) | (ids >= vocab)).any()) or not bool(known[ids].all()):
            raise MismatchError("d2t", "as offsets its values lead to other tokens than t2d marks")
    width = shape.width
    norms = len(layers) if config.values.get("fc_norm") else 0
    return Head(
        shape,
        Layer(tensors, prefix, shape, 2 * width),
        tensors.take("fc.weight", width, len(layers) * target_width, fails="layer ids"),
        [tensors.take(f"fc_norm.{i}.weight", target_width) for i in range(norms)],
        tensors.take(f"{prefix}.input_layernorm.weight", width),
        tensors.take(f"{prefix}.hidden_norm.weight", width),
        tensors.take("norm.weight", width),
        tensors.take("lm_head.weight", spoken, width, fails="vocabulary"),
        ids,
        layers,
        bool(_flag(config, "norm_before_residual")),
        bool(config.values.get("norm_output", False)),
    )


def _flag(config: Config, key: str) -> Any:
    """vLLM takes true where it is not said, speculators and SGLang false."""
    if key not in config.values:
        raise MismatchError("norm flags", f"{config.where} does not say {key}, and stacks differ in what they take then")
    return config.values[key]


def reading(head: Head, engine: Engine, points: Sequence[Point]) -> Reading:
    facts = head.shape.facts() | {
        "layer ids": head.layers,
        "vocabulary": len(engine.embed),
        "d2t": head.ids.tolist(),
        "norm flags": {"norm_before_residual": head.before, "norm_output": head.output, "fc_norm": bool(head.fc_norms)},
    }
    return Reading(each(points, lambda point: _draft(head, engine, point)), facts)


def _draft(head: Head, engine: Engine, point: Point) -> Tensor:
    states = [point.layer(k) for k in head.layers]
    if head.fc_norms:
        states = [rms(state, norm, head.shape.eps) for state, norm in zip(states, head.fc_norms, strict=True)]
    cache, logits = Cache(head.layer), []
    token_N, state_NH, position_N = point.shifted, F.linear(torch.cat(states, -1), head.fc), torch.arange(len(point.text))
    for draft in point.drafts:
        state_NH = step(head, cache, engine.embed[token_N], state_NH, position_N)[-1:]
        logits.append(F.linear(state_NH if head.output else rms(state_NH, head.norm, head.shape.eps), head.lm_head)[0])
        token_N, position_N = draft[None], position_N[-1:] + 1
    return over_target(torch.stack(logits), head.ids, len(engine.embed))


def step(head: Head, cache: Cache, embedded_NH: Tensor, state_NH: Tensor, position_N: Tensor) -> Tensor:
    """[N, H] the state that goes to the next step."""
    eps = head.shape.eps
    normed_NH = rms(state_NH, head.hidden_norm, eps)
    residual_NH = normed_NH if head.before else state_NH
    joined_NI = torch.cat([rms(embedded_NH, head.input_norm, eps), normed_NH], -1)
    residual_NH = residual_NH + cache.feed(joined_NI, position_N)
    residual_NH = residual_NH + head.layer.mlp(residual_NH)
    return rms(residual_NH, head.norm, eps) if head.output else residual_NH
