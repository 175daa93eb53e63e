"""EAGLE-3 and P-EAGLE: the portable layout, which most stacks load unchanged, and the layout of speculators.

P-EAGLE has more layers, an embedding, a mask token and a mask state.

Layers with latent attention are DeepSeek's. vLLM and SGLang know them by `Eagle3DeepseekV2ForCausalLM`.

Stacks find the layer ids in different places. k, the block whose input is read, is at the top level (vLLM, speculators). k - 1
is in `eagle_config` (SGLang, TensorRT-LLM, OpenVINO), and in `target_layer_ids` of DeepSpec. LMDeploy takes 2, n // 2, n - 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files, Reads
from drafttrain.export.format import NOT_STRICT, ConvertedDrafter, Format, Importer, Renames, Rows, StackRow
from drafttrain.export.layers import (
    LATENT,
    has_latents,
    latent_fields,
    layer_options,
    llama_fields,
    refuse_last_block,
    refuse_windows,
    window_fields,
    windows_of,
)
from drafttrain.export.speculators import INNER, TYPE, header, speculators_type
from drafttrain.export.target_ends import EMBEDDING, TRAINED_FOR, embedding_scale, is_shared, same_size
from drafttrain.export.vocabulary import draft_vocab, store_vocabulary, vocabulary_typed
from drafttrain.model.target import Target

IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUTS = "target_layer_ids"  # blocks whose outputs are read, as DeepSpec names them
SPECO = "target_hidden_layer_ids"  # the same in `eagle_config`; verl-SpeCo writes them over the top level's too
EMBED = "embed_tokens.weight"
NORMS = ("fc_norm", "norm_output", "norm_before_fc")  # flags of norms that not all drafters have
FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "qk_norm", "norm_before_fc", "own_embedding")
LAYERED = Renames({"midlayer.{rest}": "layers.0.{rest}", "{rest}": "{rest}"})
PARALLEL = Renames({"mask.hidden": "mask_hidden", "{rest}": "{rest}"})
PARALLEL_ONE = Renames({"mask.hidden": "mask_hidden", "layers.0.{rest}": "midlayer.{rest}", "{rest}": "{rest}"})
MASK = "pard_token"  # key of the mask token in the portable layout; in speculators' layout it is `mask_token_id`
MASKS = (MASK, "ptd_token_id", "mask_token_id")  # keys of it that stacks look for
HUB_VERIFIER = "vLLM 0.33 takes a hub id as the verifier; 0.32 a local path too."
QWEN = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
MODULES = (  # fields of ModelOpt's eagle_config, their usual values, and why others are refused
    ("use_input_layernorm_in_first_layer", True, "but layers here norm their embedding"),
    ("use_last_layernorm", True, "but drafters here have a norm before the head"),
    ("use_mtp_layernorm", False, "but states here are normed in the layer alone"),
    ("next_layer_regular", True, "but here the layer alone reads the embedding"),
    ("parallel_draft_step", 1, "but drafters here give one draft a step"),
    ("parallel_draft_heads_num_layers", 1, "but drafters here give one draft a step"),
)


def refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why a stack cannot load this drafter; None where it can. reads: as in `ROWS`."""
    options, stack, layer_ids, blocks = source.options, source.stack, source.layer_inputs, source.shape.blocks
    for flag in FLAGS:
        if options.get(flag) and flag not in reads:
            return f"it has {flag}, which {stack} does not read; train with drafter.{flag}=false"
    if options.get("layers", 1) > 1 and "layers" not in reads:
        return f"it has {options['layers']} layers, and {stack} is known to read one; train with drafter.layers=1"
    reason = refuse_last_block(source, reads) or refuse_windows(source, reads) or _refuse_latents(source, reads)
    if reason is not None:
        return reason
    if len(layer_ids) != 3 and "other layers" not in reads:
        return f"it taps {len(layer_ids)} blocks, but {stack} takes exactly three; train with three drafter.target_layer_ids"
    official_ids = [2, blocks // 2, blocks - 3]
    if stack == "lmdeploy" and layer_ids != official_ids:
        if len(set(official_ids)) < 3:
            return (
                f"lmdeploy captures the inputs of blocks 2, n / 2 and n - 3, which are not three in a target of {blocks} blocks"
            )
        return "its taps are not the official ones, which lmdeploy requires; train with drafter.target_layer_rule=official"
    if stack == "lmdeploy" and source.target_architecture != "LlamaForCausalLM":
        return f"lmdeploy captures no states of {source.target_architecture} targets for this family, only of LlamaForCausalLM"
    return None


def _refuse_latents(source: ExportSource, reads: Reads) -> str | None:
    """Why a drafter with latent attention cannot be exported; None where it can, and for others.

    Loaders of such layers read less than those of ordinary ones.
    """
    latent, options, stack = latent_fields(source.layer_shape), source.options, source.stack
    if not latent:
        return None
    whose = "its layers have latent attention (drafter.layer.kv_lora_rank)"
    if "latents" not in reads:
        return f"{whose}, which {stack} is not known to load; train without it"
    if options.get("norm_before_fc"):
        return f"{whose}, with which {stack} does not read norm_before_fc; train with drafter.norm_before_fc=false"
    if stack == "sglang" and options.get("layers", 1) > 1:
        return f"{whose}, of which sglang loads one layer; train with drafter.layers=1"
    if stack == "sglang" and latent["q_lora_rank"] is None:
        return f"{whose}, which sglang loads with latents of queries alone; train with drafter.layer.q_lora_rank"
    return None


def refuse_parallel(source: ExportSource, reads: Reads) -> str | None:
    """Why a stack cannot load this P-EAGLE drafter; None where it can."""
    for flag, behaviour in (("fc_norm", "vLLM drops"), ("norm_before_fc", "vLLM is not known to read")):
        if source.stack == "speculators" and source.options.get(flag):
            return f"it has {flag}, which {behaviour} from these files; export it with format=vllm"
    if source.stack == "vllm" and source.options.get("qk_norm"):
        return "it has qk_norm, which vllm is not known to read here; train with drafter.qk_norm=false"
    return refuse_last_block(source, reads) or refuse_windows(source, reads)


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
    tensors, layers = vocabulary_typed(source.tensors), source.options.get("layers", 1)
    if layers > 1:
        tensors = LAYERED.named(tensors)
        # vLLM norms the input of further layers by input_layernorm, SGLang by hidden_norm; both have the other one unused
        tensors |= {hidden_norm(i): tensors[input_norm(i)] for i in range(1, layers)}
    scaled = source.stack == "vllm" and embedding_scale(source.target) is not None
    embedding_tensors = {EMBED: source.embedded} if scaled and EMBED not in tensors else {}
    return Files(_portable_config(source, tensors, layers), tensors | embedding_tensors, as_is=tuple(embedding_tensors))


def input_norm(layer: int) -> str:
    """The norm before a layer's attention, as vLLM names it."""
    return f"layers.{layer}.input_layernorm.weight"


def hidden_norm(layer: int) -> str:
    """The same of further layers, as SGLang names it."""
    return f"layers.{layer}.hidden_norm.weight"


def parallel(source: ExportSource) -> Files:
    """The portable layout of P-EAGLE. verl-SpeCo has another name for the number of layers."""
    tensors, layers = PARALLEL.named(vocabulary_typed(source.tensors)), source.options["layers"]
    config = _portable_config(source, tensors, layers) | {MASK: mask_token(source), "num_draft_layers": layers}
    return Files(config, tensors)


def _portable_config(source: ExportSource, tensors: dict[str, Tensor], layers: int) -> dict[str, Any]:
    """config.json of the portable layout.

    vLLM takes a drafter of the type deepseek_v3 for DeepSeek's own MTP module. kimi_k2 is the same configuration.
    """
    layer_ids, shape = source.layer_inputs, source.layer_shape
    latent = latent_fields(shape)
    config = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if latent else "LlamaForCausalLMEagle3"],
        "model_type": "kimi_k2" if latent else "llama",
        **llama_fields(shape, layers, source.dtype),
        **window_fields(shape, layers),
        **latent,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "target_hidden_size": shape.hidden_size,
        IDS: layer_ids,
        "eagle_config": {
            "use_aux_hidden_state": True,
            IDS: [k - 1 for k in layer_ids],
            "return_hidden_post_norm": source.options.get("norm_output", False),
        },
        **_flags(source),
    }
    if len(layer_ids) != 3:
        config["num_aux_hidden_states"] = len(layer_ids)
    return config


def speculators(source: ExportSource) -> Files:
    """speculators' layout, with the target's embedding and its factor: the library leaves an embedding that the files lack
    uninitialised."""
    tensors = LAYERED.named(vocabulary_typed(source.tensors))
    config = header(source, "eagle3", "Eagle3Speculator")
    config |= _speculators_config(source, tensors, source.options.get("layers", 1))
    if EMBED in tensors:
        return Files(config | {"embed_requires_grad": True}, tensors)
    return Files(config, tensors | {EMBED: source.embedded}, as_is=(EMBED,))


def parallel_speculators(source: ExportSource) -> Files:
    """speculators' layout of P-EAGLE."""
    tensors = PARALLEL.named(vocabulary_typed(source.tensors))
    config = header(source, "peagle", "PEagleSpeculator")
    config |= _speculators_config(source, tensors, source.options["layers"])
    return Files(config | {"mask_token_id": mask_token(source), "embed_requires_grad": True}, tensors)


def _speculators_config(source: ExportSource, tensors: dict[str, Tensor], layers: int) -> dict[str, Any]:
    shape, model_type = source.layer_shape, "qwen3" if source.options.get("qk_norm") else "llama"
    layer_config = {"model_type": model_type, **llama_fields(shape, layers, source.dtype), **window_fields(shape, layers)}
    return {
        "transformer_layer_config": layer_config,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        **_flags(source),
        "target_hidden_size": source.shape.hidden_size,
        IDS: source.layer_inputs,
    }


def mask_token(source: ExportSource) -> int:
    """The mask token that the drafter was trained with."""
    return int(source.drafter.resolved_options()["mask_token"])


def before(source: ExportSource) -> bool:
    """Whether the residual is the normed state. Checkpoints that are older than the option do not have it."""
    return bool(source.options.get("norm_before_residual", False))


def _flags(source: ExportSource) -> dict[str, Any]:
    """norm_before_residual always, since stacks differ in its default; the others only where set, since not all stacks know
    them.
    """
    flags = {flag: True for flag in NORMS if source.options.get(flag)}
    return {"norm_before_residual": before(source), **flags}


def facts(source: ExportSource) -> dict[str, Any]:
    """The settings that a drafter must have again when it is read back, beside those of its layers."""
    flags = {flag: bool(source.options.get(flag, False)) for flag in NORMS}
    windows = windows_of(source.layer_shape, source.options.get("layers", 1))
    return {"norm flags": {"norm_before_residual": before(source), **flags}, "windows": windows}


def parallel_facts(source: ExportSource) -> dict[str, Any]:
    """The same for P-EAGLE."""
    return facts(source) | {"mask token": mask_token(source)}


def _knows(checkpoint: ExternalCheckpoint) -> bool:
    has_layer = checkpoint.has("midlayer.hidden_norm.weight") or checkpoint.has("layers.0.hidden_norm.weight")
    return checkpoint.has("fc.weight") and has_layer and TYPE not in checkpoint.config and not checkpoint.has("mask_hidden")


def _knows_parallel(checkpoint: ExternalCheckpoint) -> bool:
    return checkpoint.has("fc.weight", "mask_hidden") and TYPE not in checkpoint.config


def _parallel_names(checkpoint: ExternalCheckpoint) -> Renames:
    return PARALLEL_ONE if checkpoint.has("midlayer.hidden_norm.weight") else PARALLEL


def _inside(checkpoint: ExternalCheckpoint) -> tuple[str, ...]:
    """Where the fields of the layers are."""
    return (INNER,) if TYPE in checkpoint.config else ()


def _options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    config_path = _inside(checkpoint)
    layer_config = checkpoint.object(INNER) if config_path else checkpoint.config
    layers = checkpoint.number("num_hidden_layers", *config_path) if "num_hidden_layers" in layer_config else 1
    norms = [(checkpoint.tensors.get(input_norm(i)), checkpoint.tensors.get(hidden_norm(i))) for i in range(1, layers)]
    if any(b is not None and (a is None or not torch.equal(a, b)) for a, b in norms):
        raise UserError(
            f"{checkpoint.origin}: each of its {layers} layers reads the embedding, but here the first alone does; this layout "
            "is not supported"
        )
    eagle3_options = {"layers": layers, "own_embedding": bool(_own_embedding(checkpoint, target))}
    return _shared_options(checkpoint, layer_config, target) | eagle3_options | {"norm_output": _norm_output(checkpoint)}


def _own_embedding(checkpoint: ExternalCheckpoint, target: Target) -> tuple[str, ...]:
    """The embedding's tensor, where the drafter has one that is not the target's."""
    embedding, shape = checkpoint.tensors.get(EMBED), target.shape
    if embedding is None or list(embedding.shape) != [shape.vocab_size, shape.hidden_size]:
        return ()
    # one that was hardly trained may be the target's up to the rounding of its export
    return (EMBED,) if checkpoint.exported("own_embedding") or not is_shared(embedding, EMBEDDING, target) else ()


def _check_module(checkpoint: ExternalCheckpoint) -> None:
    """Raise UserError for modules that ModelOpt can put around the layer."""
    eagle_config = checkpoint.config.get("eagle_config") or {}
    for key, default, reason in MODULES:
        checkpoint.wants(key, eagle_config.get(key, default), (default, None), reason)


def _shared_options(checkpoint: ExternalCheckpoint, inner: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The options that P-EAGLE has too. inner: the fields of the layers."""
    config = checkpoint.config
    same_size(checkpoint, "target_hidden_size", config.get("target_hidden_size"), target.shape.hidden_size)
    same_size(checkpoint, "num_target_layers", config.get("num_target_layers"), target.shape.blocks)
    layer_ids = _layer_inputs(checkpoint, target.shape.blocks)
    _check_module(checkpoint)
    same_size(checkpoint, "num_aux_hidden_states", config.get("num_aux_hidden_states"), len(layer_ids))
    kind = LATENT if has_latents(checkpoint) else "qwen3" if inner.get("model_type") == "qwen3" else "llama"
    return {
        "target_layer_ids": [k - 1 for k in layer_ids],
        "draft_vocab": draft_vocab(checkpoint, target.shape.vocab_size),
        "fc_norm": _flag(checkpoint, "fc_norm", checkpoint.has("fc_norm.0.weight")),
        "norm_before_fc": _flag(checkpoint, "norm_before_fc", checkpoint.has("input_norm.weight")),
        "qk_norm": any(name.endswith(".self_attn.q_norm.weight") for name in checkpoint.kinds),
        "norm_before_residual": _flag(checkpoint, "norm_before_residual"),
        "layer": layer_options(checkpoint, inner, target, kind),
    }


def _layer_inputs(checkpoint: ExternalCheckpoint, blocks: int) -> list[int]:
    """The blocks whose inputs are read, from where stacks look: k at the top level, k - 1 in eagle_config and in DeepSpec's
    target_layer_ids; by default 2, n // 2, n - 3.
    """
    config, eagle_config = checkpoint.config, checkpoint.config.get("eagle_config") or {}
    if not isinstance(eagle_config, Mapping):
        raise UserError(f"{checkpoint.origin}: eagle_config is {eagle_config!r}; an object is needed")
    checkpoint.wants("use_aux_hidden_state", eagle_config.get("use_aux_hidden_state", True), (True,), "which is no EAGLE-3")
    overwritten = eagle_config.get(SPECO) is not None and config.get(IDS) == eagle_config[SPECO]
    ids_by_key = {IDS: _ids(checkpoint, IDS, config, int(overwritten))}
    ids_by_key |= {f"{key} in eagle_config": _ids(checkpoint, key, eagle_config, 1) for key in (IDS, SPECO)}
    ids_by_key |= {OUTPUTS: _ids(checkpoint, OUTPUTS, config, 1)}
    named_ids = {key: ids for key, ids in ids_by_key.items() if ids is not None}
    layer_ids = next(iter(named_ids.values()), [2, blocks // 2, blocks - 3])
    if any(ids != layer_ids for ids in named_ids.values()):
        listing = ", ".join(f"{key} means {ids}" for key, ids in named_ids.items())
        raise UserError(
            f"{checkpoint.origin}: its layer ids contradict each other, as inputs of blocks: {listing}; correct one"
        )
    if 0 in layer_ids:
        raise UserError(
            f"{checkpoint.origin}: its layer ids name the target's embedding ({OUTPUTS} -1, or the input of block 0), which "
            "drafters here do not read; this layout is not supported"
        )
    if any(not 1 <= k <= blocks for k in layer_ids) or len(set(layer_ids)) != len(layer_ids):
        id_text = (
            f"its layer ids are {layer_ids}" if named_ids else f"it names no layer ids, and the usual ones are {layer_ids}"
        )
        raise UserError(
            f"{checkpoint.origin}: {id_text}; of a target of {blocks} blocks, 1 to {blocks} can be read, once each; "
            f"{TRAINED_FOR}"
        )
    return layer_ids


def _ids(checkpoint: ExternalCheckpoint, key: str, section: Mapping[str, Any], more: int = 0) -> list[int] | None:
    """The blocks whose inputs are read; None where there is no such field. more: what stacks add to it."""
    layer_ids = section.get(key)
    if layer_ids is None:
        return None
    if (
        not isinstance(layer_ids, list)
        or not layer_ids
        or not all(isinstance(k, int) and not isinstance(k, bool) for k in layer_ids)
    ):
        raise UserError(f"{checkpoint.origin}: {key} is {layer_ids!r}; a list of numbers is needed")
    return [k + more for k in layer_ids]


def _flag(checkpoint: ExternalCheckpoint, key: str, default: bool = False) -> bool:
    value = checkpoint.config.get(key)
    return default if value is None else checkpoint.flag(key, value)


def _norm_output(checkpoint: ExternalCheckpoint) -> bool:
    """Whether the normed state goes to the next step, as the two keys that there are say it."""
    norm_fields = {"norm_output": checkpoint.config.get("norm_output")}
    norm_fields["return_hidden_post_norm"] = (checkpoint.config.get("eagle_config") or {}).get("return_hidden_post_norm")
    flags = {checkpoint.flag(key, value) for key, value in norm_fields.items() if value is not None}
    if len(flags) > 1:
        raise UserError(
            f"{checkpoint.origin}: norm_output and eagle_config's return_hidden_post_norm differ; correct one of them"
        )
    return flags.pop() if flags else False


def _mend(draft: ConvertedDrafter) -> None:
    """Note what is not said, and store the vocabulary in our form."""
    checkpoint = draft.found
    if draft.options.get("own_embedding"):
        draft.notes.append(f"{EMBED} is not this target's embedding: it is the drafter's own")
    if checkpoint.config.get(TYPE) and "norm_before_residual" not in checkpoint.config:
        draft.notes.append("config.json does not say norm_before_residual: false, as speculators takes it (vLLM takes true)")
    for layer in range(1, draft.options["layers"]):
        draft.tensors.pop(hidden_norm(layer), None)
    store_vocabulary(draft)


def _parallel_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    config_path = _inside(checkpoint)
    layer_config = checkpoint.object(INNER) if config_path else checkpoint.config
    peagle_options = {"layers": checkpoint.number("num_hidden_layers", *config_path), "mask_token": _mask(checkpoint)}
    draft_layers = checkpoint.config.get("num_draft_layers")
    checkpoint.wants("num_draft_layers", draft_layers, (None, peagle_options["layers"]), "unlike num_hidden_layers")
    peagle_options |= _shared_options(checkpoint, layer_config, target)
    checkpoint.wants("norm_output", _norm_output(checkpoint), (False,), "but drafters of this family draft in one pass")
    return peagle_options


def _mask(checkpoint: ExternalCheckpoint) -> int:
    mask_tokens = {key: checkpoint.config[key] for key in MASKS if checkpoint.config.get(key) is not None}
    if (
        not all(isinstance(x, int) and not isinstance(x, bool) for x in mask_tokens.values())
        or len(set(mask_tokens.values())) != 1
    ):
        listing = ", ".join(f"{key} {value!r}" for key, value in mask_tokens.items()) or "none"
        raise UserError(
            f"{checkpoint.origin}: one mask token is needed, as {' or '.join(MASKS)}; config.json has {listing}: correct it"
        )
    return next(iter(mask_tokens.values()))


def _parallel_mend(draft: ConvertedDrafter) -> None:
    _mend(draft)
    draft.tensors["mask.hidden"] = draft.tensors["mask.hidden"].reshape(1, 1, -1)


def _complete(draft: ConvertedDrafter, drafter_tensors: Mapping[str, Tensor]) -> None:
    """Use the target's embedding if the drafter has none, as stacks do."""
    if EMBED not in draft.tensors:
        draft.notes.append("it has no embedding: the target's is used")
        draft.tensors[EMBED] = drafter_tensors[EMBED]


SHARED = {EMBED: EMBEDDING}
_COMMON: dict[str, Any] = {"renames": LAYERED, "shared": SHARED, "mend": _mend, "own": _own_embedding}
_PARALLEL: dict[str, Any] = {"renames": _parallel_names, "mend": _parallel_mend, "complete": _complete}
PORTABLE = Importer("portable", "eagle3", _knows, _options, **_COMMON)
SPECULATORS = Importer("speculators", "eagle3", speculators_type("eagle3"), _options, **_COMMON)
PARALLEL_PORTABLE = Importer("portable", "peagle", _knows_parallel, _parallel_options, **_PARALLEL)
PARALLEL_SPECULATORS = Importer("speculators", "peagle", speculators_type("peagle"), _parallel_options, **_PARALLEL)
IMPORTERS = [PORTABLE, SPECULATORS, PARALLEL_PORTABLE, PARALLEL_SPECULATORS]


def eagle3_format(write: Callable[[ExportSource], Files], read: Importer, *reads: str) -> Format:
    """reads: what the stack is known to read beyond one layer of the default options on three of the target's blocks."""
    return Format(read.name, write, read, partial(refuse, reads=frozenset(reads)), facts)


def peagle_format(write: Callable[[ExportSource], Files], read: Importer, *reads: str) -> Format:
    """The same for P-EAGLE."""
    return Format(read.name, write, read, partial(refuse_parallel, reads=frozenset(reads)), parallel_facts)


_NORMS = ("fc_norm", "norm_output", "other layers")
_MORE = (*_NORMS, "norm_before_fc", "own_embedding", "layers")
ROWS: Rows = {
    "eagle3": {
        "vllm": StackRow(
            eagle3_format(portable, PORTABLE, *_MORE, "norm_before_residual", "last block", "windows", "latents"),
            "eagle3",
            pictures=QWEN,
            quantised=True,
        ),
        "sglang": StackRow(
            eagle3_format(portable, PORTABLE, *_MORE, "latents"),
            "EAGLE3",
            pictures=(*QWEN, "Gemma3ForConditionalGeneration"),
            quantised=True,
        ),
        "trtllm": StackRow(eagle3_format(portable, PORTABLE, *_NORMS), "Eagle3"),
        "speculators": StackRow(
            eagle3_format(speculators, SPECULATORS, *_MORE, "norm_before_residual", "qk_norm", "windows"),
            "eagle3",
            note=HUB_VERIFIER,
        ),
        "openvino": StackRow(eagle3_format(mapped, PORTABLE), "eagle3"),
        "lmdeploy": StackRow(eagle3_format(lmdeploy, PORTABLE), "eagle3"),
        "official": NOT_STRICT,
    },
    "peagle": {
        "vllm": StackRow(
            peagle_format(parallel, PARALLEL_PORTABLE, "last block", "windows"),
            "eagle3",
            {"parallel_drafting": True},
            quantised=True,
        ),
        "speculators": StackRow(
            peagle_format(parallel_speculators, PARALLEL_SPECULATORS, "windows"), "eagle3", note=HUB_VERIFIER
        ),
        "official": "the authors serve it in vLLM; format=vllm writes it",
    },
}
