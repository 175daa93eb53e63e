"""EAGLE-3 and 3.1: the portable layout, which most stacks load unchanged, and the layout of speculators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.llama import llama_fields, refuse_last_block, refuse_windows, window_fields, windows_of
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.speculators import header
from drafttrain.export.layouts.target_ends import embedding_scale

IDS = "eagle_aux_hidden_state_layer_ids"
NORMED = ("vllm", "sglang", "trtllm", "speculators")  # stacks whose loaders know fc_norm and norm_output
THREE = ("llamacpp", "openvino", "lmdeploy", "official")  # stacks that take exactly three layers
MORE = ("vllm", "sglang", "speculators")  # stacks that read one norm before fc, further layers, and an embedding
WINDOWS = ("vllm", "speculators")  # stacks that read sliding windows
UNNORMED = ("vllm", "speculators", "llamacpp")  # stacks that read norm_before_residual
NORMS = ("fc_norm", "norm_output", "norm_before_fc")  # flags of norms that not all drafters have
EMBEDDING = "embed_tokens.weight"
SPECULATORS = Renames({"midlayer.{rest}": "layers.0.{rest}", "{rest}": "{rest}"})


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    options, stack, layers, blocks = source.options, source.stack, source.layer_inputs, source.shape.blocks
    flags = {"fc_norm": NORMED, "norm_output": NORMED, "norm_before_residual": UNNORMED, "qk_norm": ("speculators",)}
    for flag, readers in (flags | {"norm_before_fc": MORE, "own_embedding": MORE}).items():
        if options.get(flag) and stack not in readers:
            return f"it was trained with {flag}, which {stack} does not read; train with drafter.{flag}=false"
    if options.get("layers", 1) > 1 and stack not in MORE:
        return f"it has {options['layers']} layers, and {stack} is known to read one; train with drafter.layers=1"
    reason = refuse_last_block(source, ("vllm",)) or refuse_windows(source, WINDOWS)
    if reason is not None:
        return reason
    if len(layers) != 3 and stack in THREE:
        return f"it taps {len(layers)} blocks, but {stack} takes exactly three; train with three drafter.taps"
    if stack == "lmdeploy" and layers != [2, blocks // 2, blocks - 3]:
        return "its taps are not the official ones, which lmdeploy requires; train with drafter.tap_rule=official"
    if stack == "lmdeploy" and source.target_architecture != "LlamaForCausalLM":
        return f"lmdeploy captures no states of {source.target_architecture} targets for this family, only of LlamaForCausalLM"
    return None


def lmdeploy(source: ExportSource) -> Files:
    """LMDeploy derives its class's name from that of an ordinary Llama."""
    files = mapped(source)
    files.config["architectures"] = ["LlamaForCausalLM"]
    return files


def mapped(source: ExportSource) -> Files:
    """The portable layout with d2t for a whole vocabulary too, for stacks that always map tokens by it."""
    files = portable(source)
    if "d2t" not in files.tensors:
        vocab = source.shape.vocab_size
        files.tensors.update(d2t=torch.zeros(vocab, dtype=torch.int64), t2d=torch.ones(vocab, dtype=torch.bool))
    return files


def portable(source: ExportSource) -> Files:
    """The portable layout. For vLLM an embedding with a factor is written, with it: its target applies it elsewhere.

    Without it a drafter's norm of embeddings leaves a difference, of its eps.
    """
    tensors, layers = weights(source), source.options.get("layers", 1)
    if layers > 1:
        tensors = {str(SPECULATORS.theirs(name)): x for name, x in tensors.items()}
    scaled = source.stack == "vllm" and embedding_scale(source.target) is not None
    own = {EMBEDDING: source.embedded} if scaled and EMBEDDING not in tensors else {}
    return Files(portable_config(source, tensors, layers), tensors | own, facts=facts(source), as_is=tuple(own))


def portable_config(source: ExportSource, tensors: dict[str, Tensor], layers: int = 1) -> dict[str, Any]:
    """config.json of the portable layout."""
    ids, shape = source.layer_inputs, source.layer_shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **llama_fields(shape, layers, source.dtype),
        **window_fields(shape, layers),
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "target_hidden_size": shape.hidden_size,
        IDS: ids,
        "eagle_config": {
            "use_aux_hidden_state": True,
            IDS: [k - 1 for k in ids],
            "return_hidden_post_norm": source.options.get("norm_output", False),
        },
        **_flags(source),
    }
    if len(ids) != 3:
        config["num_aux_hidden_states"] = len(ids)
    return config


def speculators(source: ExportSource) -> Files:
    """speculators' layout, with the target's embedding and its factor: the library leaves an embedding that the files lack
    uninitialised."""
    tensors = {str(SPECULATORS.theirs(name)): x for name, x in weights(source).items()}
    config = header(source, "eagle3", "Eagle3Speculator")
    config |= speculators_config(source, tensors, source.options.get("layers", 1))
    if EMBEDDING in tensors:
        return Files(config | {"embed_requires_grad": True}, tensors, facts=facts(source))
    return Files(config, tensors | {EMBEDDING: source.embedded}, facts=facts(source), as_is=(EMBEDDING,))


def speculators_config(source: ExportSource, tensors: dict[str, Tensor], layers: int = 1) -> dict[str, Any]:
    """The fields of speculators' layout that P-EAGLE has too."""
    shape, kind = source.layer_shape, "qwen3" if source.options.get("qk_norm") else "llama"
    inner = {"model_type": kind, **llama_fields(shape, layers, source.dtype), **window_fields(shape, layers)}
    return {
        "transformer_layer_config": inner,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        **_flags(source),
        "target_hidden_size": source.shape.hidden_size,
        IDS: source.layer_inputs,
    }


def weights(source: ExportSource) -> dict[str, Tensor]:
    """The drafter's tensors: d2t as an int64 offset, t2d as bool. The embedding is the target's."""
    tensors = source.tensors
    if "d2t" in tensors:
        tensors["d2t"], tensors["t2d"] = tensors["d2t"].to(torch.int64), tensors["t2d"].to(torch.bool)
    return tensors


def _flags(source: ExportSource) -> dict[str, Any]:
    """norm_before_residual always, since stacks differ in its default; the others only where set, since not all stacks know
    them.
    """
    flags = {flag: True for flag in NORMS if source.options.get(flag)}
    return {"norm_before_residual": before(source), **flags}


def before(source: ExportSource) -> bool:
    """Whether the residual is the normed state. Checkpoints that are older than the option do not have it."""
    return bool(source.options.get("norm_before_residual", False))


def facts(source: ExportSource) -> dict[str, Any]:
    """The facts that the reader must find in addition to the golden ones."""
    flags = {flag: bool(source.options.get(flag, False)) for flag in NORMS}
    windows = windows_of(source.layer_shape, source.options.get("layers", 1))
    own = {"windows": windows} if any(windows) else {}
    return {"norm flags": {"norm_before_residual": before(source), **flags}, **own}
