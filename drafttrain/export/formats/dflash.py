"""DFlash and JetSpec: the authors' (z-lab) layout, which most serving stacks read, and those of transformers and speculators.

JetSpec's files are DFlash's with causal blocks. Three keys say so, because each loader reads its own: the authors' code
`dflash_config.causal_head`, vLLM `dflash_config.causal`, SGLang `is_causal` at the top level. DeepSpec's files of a Markov head
of rank 0 are DFlash's too, with shifted slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.block_fields import (
    NESTED,
    causal_key,
    causal_layers,
    causal_options,
    check_factor,
    check_vocabulary,
    field_of,
    inside,
    number_of,
    refuse_causal,
    windows,
)
from drafttrain.export.external import MASK_EMBEDDING, ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files, Reads
from drafttrain.export.format import Format, Importer, Renames, Rows, StackRow
from drafttrain.export.layers import layer_options, llama_fields, refuse_last_block, refuse_windows, window_fields
from drafttrain.export.speculators import INNER, TYPE, header, speculators_type
from drafttrain.export.target_ends import (
    EMBEDDING,
    HEAD,
    TRAINED_FOR,
    embedding_scale,
    refuse_bias,
    refuse_embedding,
    same_size,
)
from drafttrain.export.vocabulary import draft_vocab, store_vocabulary, vocabulary_typed
from drafttrain.model.target import Target

SHIFTED, EMBEDDED = "sample_from_anchor", "input_embedding_scale"
SINKS = "attention_sink_bias"  # key of the flag, which vLLM looks for in `dflash_config`, and last part of the tensors' names
MUSE = Renames({"fc.{rest}": "encoder.fc.{rest}", "hidden_norm.{rest}": "encoder.output_norm_enc.{rest}", "{rest}": "{rest}"})
PLAIN = ("fc", "hidden_norm", "norm", "layers", "embed_tokens", "lm_head", "d2t", "t2d")  # first parts of tensors' names
ANCHORED = ("Qwen3DSparkModel", "DSparkDraftModel")  # classes whose slots are shifted unless their files say otherwise
COPIES = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}  # tensors of the target that some files have
QWEN3 = ("Qwen3VLForConditionalGeneration",)
CODE = "DFlashDraftModel.from_pretrained({directory!r})"
NO_CAUSAL = "it is not known to read that the slots of a block see no later slots"


def refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why a stack cannot load this drafter; None where it can. reads: as in `ROWS`."""
    return refuse_shifted(source) or refuse_sorted(source) or refuse_last(source, reads)


def refuse_sorted(source: ExportSource) -> str | None:
    """Why TensorRT-LLM, which sorts the layer ids, would join the states in another order; None where it does not."""
    if source.stack != "trtllm" or source.layer_inputs == sorted(source.layer_inputs):
        return None
    return "its taps do not ascend, but TensorRT-LLM sorts them; train with ascending drafter.target_layer_ids"


def refuse_shifted(source: ExportSource) -> str | None:
    """Why shifted slots cannot be loaded; None for slots in place."""
    if source.options["slots"] == "in_place":
        return None
    return "its slots are shifted, but loaders of this family read them in place; train with drafter.slots=in_place"


def refuse_last(source: ExportSource, reads: Reads, per_layer: bool = False) -> str | None:
    """Why a stack that accepts shifted slots cannot load this drafter; None where it can. per_layer: as in `refuse_causal`."""
    if source.options.get("draft_vocab") is not None and "draft_vocab" not in reads:
        return f"it drafts a part of the vocabulary, which {source.stack} does not read; train with drafter.draft_vocab=null"
    window_reason = refuse_windows(source, reads)
    reason = refuse_last_block(source, reads) or window_reason or refuse_causal(source, reads, per_layer)
    return reason or refuse_embedding(source, reads) or refuse_bias(source, reads)


def lmdeploy_refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why LMDeploy cannot load this drafter. Of the targets known here it captures only Qwen3's states."""
    model_type = source.target.model.config.model_type
    if model_type != "qwen3":
        return f"LMDeploy captures no states of {model_type} targets for this family, only of qwen3"
    if source.layer_inputs != sorted(source.layer_inputs):
        return "its taps do not ascend, as LMDeploy requires; train with ascending drafter.target_layer_ids"
    return refuse(source, reads)


def jetspec_refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why a stack cannot load this JetSpec drafter; None where it can."""
    if not source.options["causal"]:
        return "its slots see later ones, but in files of this family they do not; train with drafter.causal=true"
    return refuse(source, reads)


def lmdeploy(source: ExportSource) -> Files:
    """The authors' layout, with the block size in `dflash_config`, as in their newer versions."""
    files = zlab(source)
    files.config["dflash_config"]["block_size"] = source.options["block_size"]
    return files


def zlab(source: ExportSource) -> Files:
    """The authors' layout."""
    return Files(zlab_config(source, "DFlashDraftModel"), vocabulary_typed(source.tensors))


def jetspec(source: ExportSource) -> Files:
    """JetSpec's layout for all stacks that read safetensors."""
    return Files(zlab_config(source, "DFlashDraftModel", causal_head=True), source.tensors)


def zlab_config(source: ExportSource, architecture: str, **inner: Any) -> dict[str, Any]:
    """config.json of the authors' layout. inner: further fields of `dflash_config`."""
    is_causal = causal_key(source)
    dflash_fields = {"mask_token_id": mask_token(source), "target_layer_ids": outputs(source)}
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **block_fields(source),
        **({} if is_causal is None else {"is_causal": is_causal}),
        "num_target_layers": source.shape.blocks,
        "mask_token_id": dflash_fields["mask_token_id"],  # verl-SpeCo looks for it here alone
        **vocabulary_field(source),
        "dflash_config": dflash_fields | ({} if is_causal is None else {"causal": is_causal}) | sinks_field(source) | inner,
    }


def vocabulary_field(source: ExportSource) -> dict[str, Any]:
    """The size of the drafter's own vocabulary; nothing where it is the target's."""
    size = source.options.get("draft_vocab")
    return {} if size is None else {"draft_vocab_size": size}


def transformers(source: ExportSource) -> Files:
    """transformers' layout."""
    config = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **block_fields(source),
        "mask_token_id": mask_token(source),
        "target_layer_ids": outputs(source),
    }
    if any(windows(source)):
        config["sliding_window"] -= 1  # it counts the positions before a query, without its own
    return Files(config, MUSE.named(source.tensors))


def speculators(source: ExportSource) -> Files:
    """speculators' layout."""
    config = speculators_config(source, "dflash", "DFlashSpeculator")
    return Files(config, vocabulary_typed(source.tensors))


def speculators_config(source: ExportSource, algorithm: str, architecture: str) -> dict[str, Any]:
    """Speculators' configuration. Its layer ids name the blocks that read the states, unlike the authors' ids."""
    layers = source.options["layers"]
    layer_config = {"model_type": "qwen3", **llama_fields(source.layer_shape, layers, source.dtype)}
    return {
        **header(source, algorithm, architecture),
        "transformer_layer_config": layer_config | _kinds(source),
        "draft_vocab_size": source.shape.vocab_size,
        **vocabulary_field(source),
        "target_hidden_size": source.shape.hidden_size,
        "block_size": source.options["block_size"],
        "mask_token_id": mask_token(source),
        "aux_hidden_state_layer_ids": source.layer_inputs,
        "sample_from_anchor": source.options["slots"] == "shifted",
        # with false vLLM would treat the block as causal, in all layers
        "sliding_window_non_causal": not any(causal_layers(source)),
    }


def block_fields(source: ExportSource) -> dict[str, Any]:
    """The fields of the layers and of the block that the authors' and transformers' layouts share."""
    layers = source.options["layers"]
    return {
        **llama_fields(source.layer_shape, layers, source.dtype),
        "block_size": source.options["block_size"],
        **_kinds(source),
        **sinks_field(source),
    }


def sinks_field(source: ExportSource) -> dict[str, Any]:
    """The flag of attention sinks; nothing where the layers have none."""
    return {SINKS: True} if source.sinks else {}


def _kinds(source: ExportSource) -> dict[str, Any]:
    """What kind of attention each layer has. Written always, because stacks have different defaults."""
    layers = source.options["layers"]
    full_attention = {"layer_types": ["full_attention"] * layers, "use_sliding_window": False}
    return full_attention | window_fields(source.layer_shape, layers)


def outputs(source: ExportSource) -> list[int]:
    """The layer ids as blocks whose outputs are read."""
    return [k - 1 for k in source.layer_inputs]


def mask_token(source: ExportSource) -> int:
    """The mask token; by default the last token of the vocabulary."""
    mask = source.options["mask_token"]
    return source.shape.vocab_size - 1 if mask is None else int(mask)


def facts(source: ExportSource) -> dict[str, Any]:
    """The settings that a drafter must have again when it is read back, beside those of its layers."""
    return {
        "block size": source.options["block_size"],
        "mask token": mask_token(source),
        "causal layers": causal_layers(source),
        "slots": source.options["slots"],
        "windows": windows(source),
    }


def plain(found: ExternalCheckpoint) -> bool:
    """Recognises the authors' tensor names without a head. speculators has its own layout with the same names."""
    has_names = found.has("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight") and TYPE not in found.config
    has_convolution = found.has("layers.0.attention_conv.base_kernel")
    return has_names and not has_convolution and all(name.split(".")[0] in PLAIN for name in found.kinds)


def causal_head(found: ExternalCheckpoint) -> bool:
    """Whether the files say in the way of a drafter of causal blocks that its blocks are causal."""
    return bool(field_of(found, "causal_head", False))


def _anchored(checkpoint: ExternalCheckpoint) -> bool:
    return any(name in ANCHORED for name in checkpoint.architectures)


def _knows_zlab(checkpoint: ExternalCheckpoint) -> bool:
    return plain(checkpoint) and not causal_head(checkpoint) and not _anchored(checkpoint)


def _knows_deepspec(checkpoint: ExternalCheckpoint) -> bool:
    """Files of a class with a Markov head, of rank 0: their block is this family's, with shifted slots."""
    return plain(checkpoint) and _anchored(checkpoint)


def _knows_transformers(checkpoint: ExternalCheckpoint) -> bool:
    return checkpoint.has("encoder.fc.weight", "encoder.output_norm_enc.weight")


def speculators_options(
    found: ExternalCheckpoint, target: Target, shifted: bool | None = False, non_causal: bool = False, part: bool = False
) -> dict[str, Any]:
    """Options from speculators' configuration. Its layer ids are k, blocks whose inputs are read. shifted: the default
    convention; None: it must be said. non_causal: the default for slots of layers with windows. part: as for `zlab_options`.
    """
    layer_config, blocks = found.object(INNER), target.shape.blocks
    same_size(found, "target_hidden_size", found.config.get("target_hidden_size"), target.shape.hidden_size)
    layer_ids = found.field("aux_hidden_state_layer_ids")
    if not isinstance(layer_ids, list) or not all(isinstance(k, int) and 1 <= k <= blocks for k in layer_ids):
        raise UserError(
            f"{found.origin}: aux_hidden_state_layer_ids is {layer_ids!r}; of a target of {blocks} blocks, 1 to {blocks} can "
            f"be read; {TRAINED_FOR}"
        )
    sample_from_anchor = found.config.get(SHIFTED)
    sample_from_anchor = shifted if sample_from_anchor is None else found.flag(SHIFTED, sample_from_anchor)
    if sample_from_anchor is None:
        raise UserError(
            f"{found.origin}: {found.config_name} does not say {SHIFTED}, for which vLLM takes false here and SGLang true; add "
            "it as the drafter was trained"
        )
    non_causal_windows = found.config.get("sliding_window_non_causal")
    non_causal = non_causal if non_causal_windows is None else found.flag("sliding_window_non_causal", non_causal_windows)
    layer = layer_options(found, layer_config, target, "qwen3")
    return {
        **_vocabulary(found, target, part),
        "block_size": found.number("block_size"),
        "layer": layer,
        **({} if layer["sliding_window"] is None else {"causal_windows": not non_causal}),
        "layers": found.number("num_hidden_layers", INNER),
        "target_layer_ids": [k - 1 for k in layer_ids],
        "mask_token": found.number("mask_token_id", least=0),
        "slots": "shifted" if sample_from_anchor else "in_place",
    }


def own_head(found: ExternalCheckpoint, target: Target) -> tuple[str, ...]:
    """The head's tensor, where the drafter drafts a part of the target's vocabulary."""
    if not found.has("d2t", "lm_head.weight"):
        return ()
    has_own_head = len(found.tensors["lm_head.weight"]) < target.shape.vocab_size or bool(found.tensors["d2t"].any())
    return ("lm_head.weight",) if has_own_head else ()


def _vocabulary(checkpoint: ExternalCheckpoint, target: Target, part: bool) -> dict[str, Any]:
    """The option of drafters that can draft a part of the target's vocabulary. part: whether these can."""
    if part and own_head(checkpoint, target):
        return {"draft_vocab": draft_vocab(checkpoint, target.shape.vocab_size)}
    check_vocabulary(checkpoint, target.shape.vocab_size)
    return {"draft_vocab": None} if part else {}


def zlab_options(found: ExternalCheckpoint, target: Target, shifted: bool = False, part: bool = False) -> dict[str, Any]:
    """Options from a configuration in the authors' form. shifted: the convention where the files do not say it. part: they may
    draft a part of the target's vocabulary.

    The fields of the block are at the top level or in `dflash_config`. Layer ids are k - 1, blocks whose outputs are read.
    """
    factor = embedding_scale(target) or 1.0
    check_factor(found, EMBEDDED, factor, factor)  # loaders differ in whether embeddings have the target's without the field
    fields, swa_forced = _windowed(found)
    options = _options(found, fields, target)
    has_windows = options["layer"]["sliding_window"] is not None
    causal = causal_options(found, has_windows)
    if swa_forced and not causal["causal"]:
        causal["causal_windows"] = False
    # vLLM takes the second key where the first is missing, whatever the layers' windows
    options["layer"]["attention_sinks"] = found.flag(
        SINKS, field_of(found, SINKS, found.config.get("add_swa_attention_sink_bias", False))
    )
    slots = "shifted" if found.flag(SHIFTED, field_of(found, SHIFTED, shifted)) else "in_place"
    return options | causal | {"slots": slots} | _vocabulary(found, target, part)


def _windowed(checkpoint: ExternalCheckpoint) -> tuple[Mapping[str, Any], bool]:
    """(the layers' fields, whether `use_swa` alone gives them windows) with the keys of `dflash_config` that vLLM reads.

    `swa_window_size` counts before `sliding_window`. With `use_swa` all layers have windows where `layer_types` names none, and
    slots see later slots of their block.
    """
    dflash_config, layer_types = checkpoint.config.get(NESTED) or {}, checkpoint.config.get("layer_types") or []
    swa_forced = (
        dflash_config.get("use_swa") is not None
        and checkpoint.flag("use_swa", dflash_config["use_swa"])
        and "sliding_attention" not in layer_types
    )
    layer_fields: dict[str, Any] = {}
    if swa_forced:
        layer_fields = {
            "layer_types": ["sliding_attention"] * checkpoint.number("num_hidden_layers"),
            "use_sliding_window": True,
        }
    if dflash_config.get("swa_window_size") is not None:
        layer_fields["sliding_window"] = dflash_config["swa_window_size"]
    return checkpoint.config.having(layer_fields), swa_forced


def _deepspec_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    rank = field_of(checkpoint, "markov_rank", 0)
    checkpoint.wants("markov_rank", rank, (0,), "but there are no markov_head tensors")
    return zlab_options(checkpoint, target, shifted=True, part=True)


def _zlab_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    return zlab_options(checkpoint, target, part=True)


def _speculators_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    return speculators_options(checkpoint, target, part=True)


def _transformers_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    """No layer is causal. The window counts the positions to either side, and all layers have one of 2048 by default."""
    window, layers = checkpoint.config.get("sliding_window", 2048), checkpoint.number("num_hidden_layers")
    layer_types = checkpoint.config.get("layer_types") or ["sliding_attention"] * layers
    layer_fields = {"sliding_window": window + 1 if isinstance(window, int) else window, "layer_types": layer_types}
    options = _options(checkpoint, checkpoint.config.having(layer_fields), target)
    causal_fields = {} if options["layer"]["sliding_window"] is None else {"causal_windows": False}
    return options | {"causal": False, "slots": "in_place"} | causal_fields


def _options(checkpoint: ExternalCheckpoint, layers: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The options that the authors' and transformers' layouts give alike. layers: the fields of the drafter's own layers."""
    blocks = target.shape.blocks
    if (checkpoint.directory / MASK_EMBEDDING).is_file():
        raise UserError(
            f"{checkpoint.origin}: {MASK_EMBEDDING} holds an embedding of its own for masks, but drafters here embed a token "
            "of the target; take one without it"
        )
    same_size(checkpoint, "num_target_layers", checkpoint.config.get("num_target_layers"), blocks)
    layer_ids = checkpoint.field("target_layer_ids", *inside(checkpoint, "target_layer_ids"))
    if isinstance(layer_ids, list) and -1 in layer_ids:
        raise UserError(
            f"{checkpoint.origin}: target_layer_ids names -1, the target's embedding, which drafters here do not read; this "
            "layout is not supported"
        )
    if not isinstance(layer_ids, list) or not all(isinstance(b, int) and 0 <= b < blocks for b in layer_ids):
        raise UserError(
            f"{checkpoint.origin}: target_layer_ids is {layer_ids!r}, this target has blocks 0 to {blocks - 1}; {TRAINED_FOR}"
        )
    for key, size in (("target_hidden_size", target.shape.hidden_size), ("target_num_hidden_layers", blocks)):
        same_size(checkpoint, key, checkpoint.config.get(key), size)
    context_layers = checkpoint.config.get("num_context_layers")
    checkpoint.wants("num_context_layers", context_layers, (None, len(layer_ids)), f"but it names {len(layer_ids)} layers")
    return {
        "block_size": number_of(checkpoint, "block_size"),
        "layer": layer_options(checkpoint, layers, target, "qwen3"),
        "layers": checkpoint.number("num_hidden_layers"),
        "target_layer_ids": layer_ids,
        "mask_token": checkpoint.number("mask_token_id", *inside(checkpoint, "mask_token_id"), least=0),
    }


def _knows_jetspec(checkpoint: ExternalCheckpoint) -> bool:
    return plain(checkpoint) and causal_head(checkpoint)


def _jetspec_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    options = zlab_options(checkpoint, target)
    if not options["causal"]:
        raise UserError(
            f"{checkpoint.origin}: dflash_config's causal_head is true, but is_causal or causal, which engines follow, is "
            "false; correct one of them"
        )
    return options


PART: dict[str, Any] = {"shared": COPIES, "own": own_head, "mend": store_vocabulary}
ZLAB = Importer("z-lab", "dflash", _knows_zlab, _zlab_options, **PART)
DEEPSPEC = Importer("DeepSpec", "dflash", _knows_deepspec, _deepspec_options, **PART)
SPECULATORS = Importer("speculators", "dflash", speculators_type("dflash"), _speculators_options, **PART)
TRANSFORMERS = Importer("muse_glimmer_assistant", "dflash", _knows_transformers, _transformers_options, MUSE)
JETSPEC = Importer("JetSpec", "jetspec", _knows_jetspec, _jetspec_options, shared=COPIES)
IMPORTERS = [ZLAB, DEEPSPEC, SPECULATORS, TRANSFORMERS, JETSPEC]


def _format(write: Callable[[ExportSource], Files], importer: Importer, *reads: str) -> Format:
    """reads: what the stack is known to read beyond slots in place that see their whole block and all positions."""
    return Format(importer.name, write, importer, partial(refuse, reads=frozenset(reads)), facts)


def _jetspec(*reads: str) -> Format:
    return Format(JETSPEC.name, jetspec, JETSPEC, partial(jetspec_refuse, reads=frozenset(reads)), facts)


VLLM = ("windows", "draft_vocab", "last block", "causal")
SGLANG = ("windows", "draft_vocab", "causal")
AUTHORS = ("windows", "causal")
_LMDEPLOY = partial(lmdeploy_refuse, reads=frozenset({"last block"}))
ROWS: Rows = {
    "dflash": {
        "vllm": StackRow(_format(zlab, ZLAB, *VLLM), "dflash", pictures=QWEN3, quantised=True, sinks=True),
        "sglang": StackRow(_format(zlab, ZLAB, *SGLANG), "DFLASH", pictures=QWEN3),
        "trtllm": StackRow(_format(zlab, ZLAB), "DFlash"),
        "speculators": StackRow(_format(speculators, SPECULATORS, "windows", "draft_vocab"), "dflash"),
        "transformers": StackRow(_format(transformers, TRANSFORMERS, "windows", "target modules"), "dflash"),
        "openvino": StackRow(_format(zlab, ZLAB), "dflash"),
        "lmdeploy": StackRow(Format(ZLAB.name, lmdeploy, ZLAB, _LMDEPLOY, facts), "dflash"),
        "official": StackRow(_format(zlab, ZLAB, *AUTHORS), CODE),
    },
    "jetspec": {
        "vllm": StackRow(_jetspec(*VLLM), "dflash", quantised=True, sinks=True),
        "sglang": StackRow(_jetspec(*SGLANG), "DFLASH"),
        **dict.fromkeys(("trtllm", "openvino", "lmdeploy"), NO_CAUSAL),
        "speculators": "its flag for causal blocks is only of layers with sliding windows",
        "transformers": "its DFlash has no key for causal blocks: slots see their whole block",
        "official": StackRow(_jetspec("causal"), CODE),
    },
}
