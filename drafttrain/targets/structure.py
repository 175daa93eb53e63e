"""Transformers models: text part, blocks, dimensions, unsupported features, fingerprint. Shapes: S samples of a parameter."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.model.shapes import TargetShape
from drafttrain.ops.fp8 import Fp8Linear

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # fields of configurations that multiply logits
DIVISORS = ("logits_scaling",)  # fields that divide logits, or the state before the output matrix
MULTIPLYING = ("hyperclovax",)  # model types whose DIVISORS multiply


# types of layers whose caches and masks are known here
KNOWN = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "conv", "linear_attention", "mamba"}
KNOWN |= {"attention", "moe"}

UNSUPPORTED = {  # by a field of configurations
    "compress_rates": "its layers cache whole windows of positions as one entry, which rejected drafts cannot be taken out of",
    "index_kpool": "its index pools positions that stand at the same places in all rows, and rows have several lengths",
    "index_block_size": "its index chooses blocks of places in the cache, which ours does not keep",
}


def unsupported(config: Any) -> str | None:
    """What a model of this text configuration has that our cache does not support, as far as its fields tell."""
    return next((reason for name, reason in UNSUPPORTED.items() if getattr(config, name, None)), None)


def lacking(model: Any, error: Exception) -> str:
    """What a failed architecture has that our cache and masks do not support, as far as it shows, and what it raised."""
    base, config = model.base_model, model.config.get_text_config()
    if hasattr(base, "build_alibi_tensor") or getattr(config, "alibi", False):
        return "its alibi biases count positions along a 2-D mask, which rows of several lengths and draft trees do not have"
    if (reason := unsupported(config)) is not None:
        return reason
    raised = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown_types := sorted(layer_types - KNOWN):
        return f"its layers of type {', '.join(unknown_types)} are not known here: {raised}"
    if is_recurrent(model):
        return f"its recurrent layers keep their state in a way that is not known here: {raised}"
    return raised


def is_recurrent(model: Any) -> bool:
    """Whether some layers keep a recurrent state or a convolution's last inputs instead of keys and values."""
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if layer_types and layer_types <= {"attention", "full_attention", "sliding_attention"}:
        return False  # a dense model of a hybrid's class
    return bool(getattr(model, "_is_stateful", False) or {"conv", "linear_attention"} & layer_types)


def find_blocks(model: nn.Module, blocks: int) -> nn.ModuleList:
    """The list of the model's decoder blocks. Raises UserError for a model without one."""
    for submodel in (*_text_parts(model), model):  # an encoder of images may have as many blocks
        for module in submodel.modules():
            if isinstance(module, nn.ModuleList) and len(module) == blocks:
                return module
    raise UserError(f"{type(model).__name__} has no list of its {blocks} blocks to tap; choose a decoder-only causal LM")


def find_backbone(model: PreTrainedModel, blocks: int) -> Any:
    """The text model without its head: the innermost model that contains the decoder blocks.

    `base_model` will not do: it may be the causal LM itself, or contain an encoder of images. Where the text model is no
    transformers model of its own it is `base_model` all the same.
    """
    chain = find_blocks(model, blocks)
    inner = [
        submodel for submodel in _text_parts(model) if submodel is not model and any(m is chain for m in submodel.modules())
    ]
    return inner[-1] if inner else model.base_model


def _text_parts(model: Any) -> list[Any]:
    """The transformers models inside this one that have the configuration of the text part, from the outside in."""
    if not isinstance(model, PreTrainedModel):
        return []
    text_config_cls = type(model.config.get_text_config())
    return [
        submodel
        for submodel in model.modules()
        if isinstance(submodel, PreTrainedModel) and isinstance(submodel.config, text_config_cls)
    ]


def register(root: nn.Module, name: str, item: nn.Module | nn.Parameter) -> None:
    """Register a module or a parameter under a dotted name."""
    *path, last = name.split(".")
    for component in path:
        if component not in dict(root.named_children()):
            root.add_module(component, nn.Module())
        root = root.get_submodule(component)
    setattr(root, last, item)


def set_depth(config: Any, blocks: int) -> Any:
    """Set the number of blocks of a transformers configuration, in place; layer types repeat. Returns its text part."""
    text = config.get_text_config()
    old_depth, shared = text.num_hidden_layers, getattr(text, "num_kv_shared_layers", None) or 0
    if shared:  # the last blocks read the keys and values of earlier ones
        text.num_kv_shared_layers = max(0, blocks - (old_depth - shared))
    text.num_hidden_layers = blocks
    for name in (
        "layer_types",
        "layers_block_type",
        "mlp_layer_types",
        "indexer_types",
        "no_rope_layers",
    ):  # one entry per block
        if types := getattr(text, name, None):
            with suppress(AttributeError):  # a property that follows the number of blocks
                setattr(text, name, [types[i % len(types)] for i in range(blocks)])
    return text


def scale_of(config: Any) -> float:
    """The factor that a transformers text configuration applies to the output matrix's logits."""
    multiplies, scale = getattr(config, "model_type", None) in MULTIPLYING, 1.0
    for name in (*FACTORS, *DIVISORS):
        value = getattr(config, name, None)
        if isinstance(value, int | float):
            scale = scale * value if multiplies or name in FACTORS else scale / value
    return scale


def shape_of(config: Any) -> TargetShape:
    """The dimensions of a transformers text configuration. Raises UserError for a model without attention."""
    # where dimensions differ by block, those of the first
    layer = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
    heads = getattr(layer, "num_attention_heads", None)
    if heads is None:
        raise UserError(f"{type(config).__name__} has no attention heads and so no KV cache; choose another target")
    if getattr(config, "num_kv_shared_layers", 0) == config.num_hidden_layers:
        raise UserError("all its layers read the keys and values of another model, as an assistant's do; name that model")
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    norm_eps = getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_epsilon", None) or 1e-5
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    return TargetShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        blocks=config.num_hidden_layers,
        heads=heads,
        kv_heads=heads if heads % kv_heads else kv_heads,  # latent attention ignores this field, so it may hold any number
        head_dim=getattr(layer, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=getattr(layer, "intermediate_size", None) or 4 * config.hidden_size,
        max_positions=getattr(config, "max_position_embeddings", None) or 2048,
        rope_theta=float(theta),
        norm_eps=float(norm_eps),
    )


CACHES = ("cache", "past_key_values")  # a model's cache among arguments and outputs; the second before transformers 5.24


def cache_argument(forward: Callable[..., Any]) -> str:
    """The name by which this forward takes a cache."""
    return CACHES[0] if CACHES[0] in inspect.signature(forward).parameters else CACHES[1]


SAMPLES = 64  # values read per parameter: cheap at 70B, and a training step changes nearly all of them
Samples = dict[str, tuple[tuple[int, ...], bytes]]  # by the parameter's name: `sampled`
SMALLEST = 2.0**-14  # float16's smallest normal number: smaller values differ in a float16 copy


def sampled_places(count: int) -> Tensor:
    """Places of the values that are read of a parameter of `count` values."""
    return torch.arange(0, count, _stride(count))[:SAMPLES]


def sample_of(parameter: nn.Parameter) -> tuple[tuple[int, ...], Tensor]:
    """(shape, sampled values) of a parameter that is whole."""
    flat = parameter.detach().reshape(-1)
    return tuple(parameter.shape), flat[:: _stride(flat.numel())][:SAMPLES]


def _stride(count: int) -> int:
    return max(1, count // SAMPLES)


def fingerprint_of(
    model: nn.Module,
    whole: Callable[[nn.Parameter], AbstractContextManager[Any]] = nullcontext,
    sample: Callable[[nn.Parameter], tuple[tuple[int, ...], Tensor]] = sample_of,
) -> str:
    """A hash of a model's weights: sha256, in hexadecimal, over parameter names, shapes and an evenly strided sample.

    Samples are rounded to bfloat16, and tiny ones to zero, so that the same weights have the same hash in every dtype. float32
    and bfloat16 always agree; float16 agrees unless the weights were stored in float32. A weight in FP8 counts as the matrix
    that its codes stand for. whole: a context in which a sharded parameter has all its values. sample: reads a parameter, as
    `sample_of`.
    """
    samples: Samples = {}
    fp8 = {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] in fp8 and not name.endswith(".bias"):
            continue
        with whole(parameter):
            samples[name] = sampled(*sample(parameter))
    for name, module in fp8.items():
        samples[f"{name}.weight"] = sampled(tuple(module.code.shape), module.values(sampled_places(module.code.numel())))
    return fingerprint_from(samples)


def sampled(shape: tuple[int, ...], sample_S: Tensor) -> tuple[tuple[int, ...], bytes]:
    """What a fingerprint depends on, of one parameter: its shape, and the bytes of its rounded sample."""
    return shape, _bytes(sample_S.detach().cpu())


def fingerprint_from(found: Samples) -> str:
    """`fingerprint_of` a model with these parameters, which need not be in memory together."""
    digest = hashlib.sha256()
    for name, (shape, sample) in sorted(found.items()):
        digest.update(f"{name} {shape}\n".encode())
        digest.update(sample)
    return digest.hexdigest()


def _bytes(sample_S: Tensor) -> bytes:
    if not sample_S.is_floating_point():  # quantised weights: their bytes are their values
        return sample_S.contiguous().view(torch.uint8).numpy().tobytes()
    rounded_S = sample_S.bfloat16()  # before the threshold: a value may round up to it
    flushed_S = torch.where(rounded_S.abs() < SMALLEST, torch.zeros_like(rounded_S), rounded_S)
    return flushed_S.view(torch.int16).numpy().tobytes()
