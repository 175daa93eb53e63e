"""EAGLE-3 as serving stacks read it: the portable layout (`midlayer.*`), and the layout of speculators (`layers.0.*`).

Shapes: c tokens of a text, N positions fed, D draft vocabulary, V vocabulary, H hidden.

Stacks find the layer ids in different places and read them differently; k is the input of block k:

    vLLM           top-level eagle_aux_hidden_state_layer_ids, k; without it its V1 runner takes the nested list unchanged
    SGLang         eagle_config's eagle_aux_hidden_state_layer_ids + 1
    TensorRT-LLM   the same, given on its command line as eagle3_layers_to_capture
    OpenVINO       the same, stored in the converted model as hidden_layers_list
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

from tests.export_oracles.layer import Cache, Layer, LayerDimensions, layer_of, rms
from tests.export_oracles.parts import (
    Config,
    MismatchError,
    Point,
    Reading,
    TargetParts,
    Tensors,
    each,
    over_target,
    speculators_layers,
)

IDS = "eagle_aux_hidden_state_layer_ids"
MAPPED = {"lmdeploy": "LMDeploy would draft only token 0", "openvino": "optimum-intel would map tokens by uninitialised memory"}
EMBEDDING = "embed_tokens.weight"
EMBEDS = ("vllm", "sglang")  # stacks that read an embedding of the drafter's own
FURTHER = {"sglang": ("hidden_norm", "input_layernorm")}  # norm before the attention of further layers, and the unused one
ARCHITECTURES = {"lmdeploy": "LlamaForCausalLM"}  # LMDeploy adds the method's name to it
LATENTS = ("vllm", "sglang")  # stacks that load layers with latent attention, by another class


@dataclass(frozen=True, slots=True)
class Head:
    """A loaded drafter."""

    shape: LayerDimensions
    layer: Layer
    fc: Tensor
    fc_norms: list[Tensor]
    input_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor
    lm_head: Tensor
    ids: Tensor
    layers: list[int]
    before: bool  # the residual is the normed state
    output: bool  # the next step reads the normed state
    together: Tensor | None = None  # a norm of all states, before fc
    others: tuple[tuple[Layer, Tensor], ...] = ()  # further layers, each with its input norm

    def caches(self) -> list[Cache]:
        """An empty cache of each layer."""
        return [Cache(self.layer), *(Cache(layer) for layer, _ in self.others)]

    def fused(self, states: list[Tensor]) -> Tensor:
        """[N, H]: what the first layer reads of the target's states."""
        if self.fc_norms:
            states = [rms(state, norm, self.shape.eps) for state, norm in zip(states, self.fc_norms, strict=True)]
        joined = torch.cat(states, -1)
        return F.linear(joined if self.together is None else rms(joined, self.together, self.shape.eps), self.fc)


def portable(stack: str) -> Callable[[Path, TargetParts, Sequence[Point]], Reading]:
    """The reader of the portable layout for this stack."""

    def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
        config, tensors = Config.of(directory), Tensors(directory)
        layers = portable_layers(stack, config, target.blocks)
        if stack in MAPPED and "d2t" not in tensors.left:
            raise MismatchError("d2t", f"it is missing, and {MAPPED[stack]}")
        if stack in EMBEDS and EMBEDDING in tensors.left:  # they take the target's where the files have none
            target = replace(target, embed=tensors.take(EMBEDDING, *target.embed.shape, fails="vocabulary"))
        prefix = "layers.0" if config.get("num_hidden_layers", "config") > 1 else "midlayer"
        if "kv_lora_rank" in config.values and "layers.0.hidden_norm.weight" in tensors.left:  # these loaders take both names
            prefix = "layers.0"
        norm, other = FURTHER.get(stack, ("input_layernorm", "hidden_norm"))
        head = head_of(config, config, tensors, prefix, target, layers, norm)
        for number in range(1, len(head.others) + 1):
            tensors.left.pop(f"layers.{number}.{other}.weight", None)  # a parameter of its layers which it does not use
        tensors.finish()
        if head.before and stack in ("sglang", "trtllm"):
            raise MismatchError("norm flags", f"norm_before_residual is true, which {stack} does not read")
        return reading(head, target, points)

    return read


def speculators(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """The library reads the embedding from the files; without one it uses uninitialised memory."""
    config, tensors = Config.of(directory), Tensors(directory)
    inner = speculators_layer(config, "eagle3", "Eagle3Speculator", target)
    target = replace(target, embed=tensors.take(EMBEDDING, *target.embed.shape, fails="vocabulary"))
    head = head_of(config, inner, tensors, "layers.0", target, config.get(IDS, "layer ids"))
    tensors.finish()
    return reading(head, target, points)


def speculators_layer(config: Config, kind: str, architecture: str, target: TargetParts) -> Config:
    """The layers' own configuration in speculators' layout, checked."""
    config.expect("target_hidden_size", target.embed.shape[1], "config")
    layers = config.inside("transformer_layer_config", "config").values.get("model_type")
    return speculators_layers(config, kind, architecture, "qwen3" if layers == "qwen3" else "llama")


def portable_layers(stack: str, config: Config, blocks: int) -> list[int]:
    """Check a configuration of the portable layout, and give the layer ids that this stack finds in it."""
    if "kv_lora_rank" in config.values and stack in LATENTS:
        config.expect("architectures", ["Eagle3DeepseekV2ForCausalLM"], "architecture")
        config.expect("model_type", "kimi_k2", "architecture")
        if stack == "sglang" and (config.values["q_lora_rank"] is None or config.values["num_hidden_layers"] != 1):
            raise MismatchError("architecture", "SGLang loads one such layer, whose queries have a latent")
    else:
        config.expect("architectures", [ARCHITECTURES.get(stack, "LlamaForCausalLMEagle3")], "architecture")
        config.expect("model_type", "llama", "architecture")
    nested = config.inside("eagle_config", "layer ids")
    nested.expect("use_aux_hidden_state", True, "layer ids")
    if stack == "lmdeploy":
        layers = [2, blocks // 2, blocks - 3]
    elif stack == "vllm":
        layers = list(config.values.get(IDS) or nested.get(IDS, "layer ids"))
    else:
        layers = [number + 1 for number in nested.get(IDS, "layer ids")]
    if len(layers) != 3:
        config.expect("num_aux_hidden_states", len(layers), "layer ids")
    return layers


def head_of(
    config: Config,
    inner: Config,
    tensors: Tensors,
    prefix: str,
    target: TargetParts,
    layers: list[int],
    norm: str = "input_layernorm",
) -> Head:
    """Load the drafter. config: holds the drafter's own fields. inner: holds those of its layer. norm: of further layers."""
    inner.expect("tie_word_embeddings", False, "config")  # with true, stacks would use the embedding as the head
    shape, (vocab, target_width) = LayerDimensions.of(inner), target.embed.shape
    inner.expect("vocab_size", vocab, "vocabulary")
    draft_vocab = config.get("draft_vocab_size", "vocabulary")
    ids = torch.arange(draft_vocab)
    if draft_vocab != vocab or "d2t" in tensors.left:
        ids = ids + tensors.take("d2t", draft_vocab, fails="d2t")
        known = tensors.take("t2d", vocab, fails="d2t")
        if known.dtype != torch.bool or int(known.sum()) != draft_vocab:
            raise MismatchError(
                "d2t", f"t2d is {known.dtype} with {int(known.sum())} trues; bool with {draft_vocab} are needed"
            )
        if bool(((ids < 0) | (ids >= vocab)).any()) or not bool(known[ids].all()):
            raise MismatchError("d2t", "as offsets its values lead to other tokens than t2d marks")
    norms = len(layers) if config.values.get("fc_norm") else 0
    before, output = bool(_flag(config, "norm_before_residual")), bool(config.values.get("norm_output", False))
    qk = inner.values.get("model_type") == "qwen3"
    head = load_head(tensors, prefix, shape, target_width, ids, layers, norms, before, output, qk)
    width, others = len(layers) * target_width, list[tuple[Layer, Tensor]]()
    together = tensors.take("input_norm.weight", width, fails="norm flags") if config.values.get("norm_before_fc") else None
    for number in range(1, inner.get("num_hidden_layers", "config")):
        layer = layer_of(tensors, f"layers.{number}", shape, shape.width, norms=qk, number=number)
        others.append((layer, tensors.take(f"layers.{number}.{norm}.weight", shape.width)))
    return replace(head, together=together, others=tuple(others))


def load_head(
    tensors: Tensors, prefix: str, shape: LayerDimensions, target_width: int, ids: Tensor, layers: list[int], norms: int,
    before: bool, output: bool, qk: bool = False,
) -> Head:  # fmt: skip
    """Take a drafter's tensors of its first layer. norms: number of norms before fc. before, output: as in `Head`. qk: queries
    and keys are normed.
    """
    width = shape.width
    return Head(
        shape,
        layer_of(tensors, prefix, shape, 2 * width, norms=qk),
        tensors.take("fc.weight", width, len(layers) * target_width, fails="layer ids"),
        [tensors.take(f"fc_norm.{i}.weight", target_width) for i in range(norms)],
        tensors.take(f"{prefix}.input_layernorm.weight", width),
        tensors.take(f"{prefix}.hidden_norm.weight", width),
        tensors.take("norm.weight", width),
        tensors.take("lm_head.weight", len(ids), width, fails="vocabulary"),
        ids,
        layers,
        before,
        output,
    )


def _flag(config: Config, key: str) -> Any:
    """This flag must be written: by default vLLM assumes true, speculators and SGLang false."""
    if key not in config.values:
        raise MismatchError("norm flags", f"{config.where} does not say {key}, and stacks have different defaults")
    return config.values[key]


def reading(head: Head, target: TargetParts, points: Sequence[Point]) -> Reading:
    """Draft with a loaded drafter."""
    facts = head.shape.facts() | {
        "layer ids": head.layers,
        "vocabulary": len(target.embed),
        "d2t": head.ids.tolist(),
        "norm flags": {"norm_before_residual": head.before, "norm_output": head.output, "fc_norm": bool(head.fc_norms)}
        | {"norm_before_fc": head.together is not None},
    }
    return Reading(each(points, lambda point: _draft(head, target, point)), facts)


def _draft(head: Head, target: TargetParts, point: Point) -> Tensor:
    caches, logits = head.caches(), []
    state_NH = head.fused([point.layer(k) for k in head.layers])
    token_N, position_N = point.shifted, torch.arange(len(point.text))
    for draft in point.drafts:
        state_NH = step(head, caches, target.embed[token_N], state_NH, position_N)[-1:]
        logits.append(F.linear(state_NH if head.output else rms(state_NH, head.norm, head.shape.eps), head.lm_head)[0])
        token_N, position_N = draft[None], position_N[-1:] + 1
    return over_target(torch.stack(logits), head.ids, len(target.embed))


def step(head: Head, caches: list[Cache], embedded_NH: Tensor, state_NH: Tensor, position_N: Tensor) -> Tensor:
    """[N, H]: the state for the next step."""
    eps = head.shape.eps
    normed_NH = rms(state_NH, head.hidden_norm, eps)
    residual_NH = normed_NH if head.before else state_NH
    joined_NI = torch.cat([rms(embedded_NH, head.input_norm, eps), normed_NH], -1)
    residual_NH = residual_NH + caches[0].feed(joined_NI, position_N)
    residual_NH = residual_NH + head.layer.mlp(residual_NH)
    for cache, (layer, norm) in zip(caches[1:], head.others, strict=True):
        residual_NH = residual_NH + cache.feed(rms(residual_NH, norm, eps), position_N)
        residual_NH = residual_NH + layer.mlp(residual_NH)
    return rms(residual_NH, head.norm, eps) if head.output else residual_NH
