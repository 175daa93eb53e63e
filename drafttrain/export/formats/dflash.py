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
    windowed = refuse_windows(source, reads)
    taps = refuse_last_block(source, reads) or windowed or refuse_causal(source, reads, per_layer)
    return taps or refuse_embedding(source, reads) or refuse_bias(source, reads)


def lmdeploy_refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why LMDeploy cannot load this drafter. Of the targets known here it captures only Qwen3's states."""
    kind = source.target.model.config.model_type
    if kind != "qwen3":
        return f"LMDeploy captures no states of {kind} targets for this family, only of qwen3"
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
    key = causal_key(source)
    own = {"mask_token_id": mask_token(source), "target_layer_ids": outputs(source)}
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **block_fields(source),
        **({} if key is None else {"is_causal": key}),
        "num_target_layers": source.shape.blocks,
        **vocabulary_field(source),
        "dflash_config": own | ({} if key is None else {"causal": key}) | inner,
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
    inner = {"model_type": "qwen3", **llama_fields(source.layer_shape, layers, source.dtype)}
    return {
        **header(source, algorithm, architecture),
        "transformer_layer_config": inner | _kinds(source),
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
    }


def _kinds(source: ExportSource) -> dict[str, Any]:
    """What kind of attention each layer has. Written always, because stacks have different defaults."""
    layers = source.options["layers"]
    full = {"layer_types": ["full_attention"] * layers, "use_sliding_window": False}
    return full | window_fields(source.layer_shape, layers)


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
    named = found.has("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight") and TYPE not in found.config
    mixed = found.has("layers.0.attention_conv.base_kernel")
    return named and not mixed and all(name.split(".")[0] in PLAIN for name in found.kinds)


def causal_head(found: ExternalCheckpoint) -> bool:
    """Whether the files say in the way of a drafter of causal blocks that its blocks are causal."""
    return bool(field_of(found, "causal_head", False))


def _anchored(found: ExternalCheckpoint) -> bool:
    return any(name in ANCHORED for name in found.architectures)


def _knows_zlab(found: ExternalCheckpoint) -> bool:
    return plain(found) and not causal_head(found) and not _anchored(found)


def _knows_deepspec(found: ExternalCheckpoint) -> bool:
    """Files of a class with a Markov head, of rank 0: their block is this family's, with shifted slots."""
    return plain(found) and _anchored(found)


def _knows_transformers(found: ExternalCheckpoint) -> bool:
    return found.has("encoder.fc.weight", "encoder.output_norm_enc.weight")


def speculators_options(
    found: ExternalCheckpoint, target: Target, shifted: bool | None = False, non_causal: bool = False, part: bool = False
) -> dict[str, Any]:
    """Options from speculators' configuration. Its layer ids are k, blocks whose inputs are read. shifted: the default
    convention; None: it must be said. non_causal: the default for slots of layers with windows. part: as for `zlab_options`.
    """
    inner, blocks = found.object(INNER), target.shape.blocks
    same_size(found, "target_hidden_size", found.config.get("target_hidden_size"), target.shape.hidden_size)
    layers = found.field("aux_hidden_state_layer_ids")
    if not isinstance(layers, list) or not all(isinstance(k, int) and 1 <= k <= blocks for k in layers):
        raise UserError(
            f"{found.origin}: aux_hidden_state_layer_ids is {layers!r}; of a target of {blocks} blocks, 1 to {blocks} can be "
            f"read; {TRAINED_FOR}"
        )
    given = found.config.get(SHIFTED)
    given = shifted if given is None else found.flag(SHIFTED, given)
    if given is None:
        raise UserError(
            f"{found.origin}: {found.config_name} does not say {SHIFTED}, for which vLLM takes false here and SGLang true; add "
            "it as the drafter was trained"
        )
    given_windows = found.config.get("sliding_window_non_causal")
    non_causal = non_causal if given_windows is None else found.flag("sliding_window_non_causal", given_windows)
    own = layer_options(found, inner, target, "qwen3")
    return {
        **_vocabulary(found, target, part),
        "block_size": found.number("block_size"),
        "layer": own,
        **({} if own["sliding_window"] is None else {"causal_windows": not non_causal}),
        "layers": found.number("num_hidden_layers", INNER),
        "target_layer_ids": [k - 1 for k in layers],
        "mask_token": found.number("mask_token_id", least=0),
        "slots": "shifted" if given else "in_place",
    }


def own_head(found: ExternalCheckpoint, target: Target) -> tuple[str, ...]:
    """The head's tensor, where the drafter drafts a part of the target's vocabulary."""
    if not found.has("d2t", "lm_head.weight"):
        return ()
    apart = len(found.tensors["lm_head.weight"]) < target.shape.vocab_size or bool(found.tensors["d2t"].any())
    return ("lm_head.weight",) if apart else ()


def _vocabulary(found: ExternalCheckpoint, target: Target, part: bool) -> dict[str, Any]:
    """The option of drafters that can draft a part of the target's vocabulary. part: whether these can."""
    if part and own_head(found, target):
        return {"draft_vocab": draft_vocab(found, target.shape.vocab_size)}
    check_vocabulary(found, target.shape.vocab_size)
    return {"draft_vocab": None} if part else {}


def zlab_options(found: ExternalCheckpoint, target: Target, shifted: bool = False, part: bool = False) -> dict[str, Any]:
    """Options from a configuration in the authors' form. shifted: the convention where the files do not say it. part: they may
    draft a part of the target's vocabulary.

    The fields of the block are at the top level or in `dflash_config`. Layer ids are k - 1, blocks whose outputs are read.
    """
    factor = embedding_scale(target) or 1.0
    check_factor(found, EMBEDDED, factor, factor)  # loaders differ in whether embeddings have the target's without the field
    fields, forced = _windowed(found)
    options = _options(found, fields, target)
    windows = options["layer"]["sliding_window"] is not None
    causal = causal_options(found, windows)
    if forced and not causal["causal"]:
        causal["causal_windows"] = False
    slots = "shifted" if found.flag(SHIFTED, field_of(found, SHIFTED, shifted)) else "in_place"
    return options | causal | {"slots": slots} | _vocabulary(found, target, part)


def _windowed(found: ExternalCheckpoint) -> tuple[Mapping[str, Any], bool]:
    """(the layers' fields, whether `use_swa` alone gives them windows) with the keys of `dflash_config` that vLLM reads.

    `swa_window_size` counts before `sliding_window`. With `use_swa` all layers have windows where `layer_types` names none, and
    slots see later slots of their block.
    """
    inner, kinds = found.config.get(NESTED) or {}, found.config.get("layer_types") or []
    forced = inner.get("use_swa") is not None and found.flag("use_swa", inner["use_swa"]) and "sliding_attention" not in kinds
    own: dict[str, Any] = {}
    if forced:
        own = {"layer_types": ["sliding_attention"] * found.number("num_hidden_layers"), "use_sliding_window": True}
    if inner.get("swa_window_size") is not None:
        own["sliding_window"] = inner["swa_window_size"]
    return found.config.having(own), forced


def _deepspec_options(found: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    rank = field_of(found, "markov_rank", 0)
    found.wants("markov_rank", rank, (0,), "but there are no markov_head tensors")
    return zlab_options(found, target, shifted=True, part=True)


def _zlab_options(found: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    return zlab_options(found, target, part=True)


def _speculators_options(found: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    return speculators_options(found, target, part=True)


def _transformers_options(found: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    """No layer is causal. The window counts the positions to either side, and all layers have one of 2048 by default."""
    window, layers = found.config.get("sliding_window", 2048), found.number("num_hidden_layers")
    kinds = found.config.get("layer_types") or ["sliding_attention"] * layers
    more = {"sliding_window": window + 1 if isinstance(window, int) else window, "layer_types": kinds}
    options = _options(found, found.config.having(more), target)
    windows = {} if options["layer"]["sliding_window"] is None else {"causal_windows": False}
    return options | {"causal": False, "slots": "in_place"} | windows


def _options(found: ExternalCheckpoint, layers: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The options that the authors' and transformers' layouts give alike. layers: the fields of the drafter's own layers."""
    blocks = target.shape.blocks
    if (found.directory / MASK_EMBEDDING).is_file():
        raise UserError(
            f"{found.origin}: {MASK_EMBEDDING} holds an embedding of its own for masks, but drafters here embed a token of the "
            "target; take one without it"
        )
    same_size(found, "num_target_layers", found.config.get("num_target_layers"), blocks)
    taps = found.field("target_layer_ids", *inside(found, "target_layer_ids"))
    if isinstance(taps, list) and -1 in taps:
        raise UserError(
            f"{found.origin}: target_layer_ids names -1, the target's embedding, which drafters here do not read; this layout "
            "is not supported"
        )
    if not isinstance(taps, list) or not all(isinstance(b, int) and 0 <= b < blocks for b in taps):
        raise UserError(
            f"{found.origin}: target_layer_ids is {taps!r}, this target has blocks 0 to {blocks - 1}; {TRAINED_FOR}"
        )
    return {
        "block_size": number_of(found, "block_size"),
        "layer": layer_options(found, layers, target, "qwen3"),
        "layers": found.number("num_hidden_layers"),
        "target_layer_ids": taps,
        "mask_token": found.number("mask_token_id", *inside(found, "mask_token_id"), least=0),
    }


def _knows_jetspec(found: ExternalCheckpoint) -> bool:
    return plain(found) and causal_head(found)


def _jetspec_options(found: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    options = zlab_options(found, target)
    if not options["causal"]:
        raise UserError(
            f"{found.origin}: dflash_config's causal_head is true, but is_causal or causal, which engines follow, is false; "
            "correct one of them"
        )
    return options


PART: dict[str, Any] = {"shared": COPIES, "own": own_head, "mend": store_vocabulary}
ZLAB = Importer("z-lab", "dflash", _knows_zlab, _zlab_options, **PART)
DEEPSPEC = Importer("DeepSpec", "dflash", _knows_deepspec, _deepspec_options, **PART)
SPECULATORS = Importer("speculators", "dflash", speculators_type("dflash"), _speculators_options, **PART)
TRANSFORMERS = Importer("muse_glimmer_assistant", "dflash", _knows_transformers, _transformers_options, MUSE)
JETSPEC = Importer("JetSpec", "jetspec", _knows_jetspec, _jetspec_options, shared=COPIES)
IMPORTERS = [ZLAB, DEEPSPEC, SPECULATORS, TRANSFORMERS, JETSPEC]


def _format(write: Callable[[ExportSource], Files], read: Importer, *reads: str) -> Format:
    """reads: what the stack is known to read beyond slots in place that see their whole block and all positions."""
    return Format(read.name, write, read, partial(refuse, reads=frozenset(reads)), facts)


def _jetspec(*reads: str) -> Format:
    return Format(JETSPEC.name, jetspec, JETSPEC, partial(jetspec_refuse, reads=frozenset(reads)), facts)


VLLM = ("windows", "draft_vocab", "last block", "causal")
SGLANG = ("windows", "draft_vocab", "causal")
AUTHORS = ("windows", "causal")
_LMDEPLOY = partial(lmdeploy_refuse, reads=frozenset({"last block"}))
ROWS: Rows = {
    "dflash": {
        "vllm": StackRow(_format(zlab, ZLAB, *VLLM), "dflash", pictures=QWEN3),
        "sglang": StackRow(_format(zlab, ZLAB, *SGLANG), "DFLASH", pictures=QWEN3),
        "trtllm": StackRow(_format(zlab, ZLAB), "DFlash"),
        "speculators": StackRow(_format(speculators, SPECULATORS, "windows", "draft_vocab"), "dflash"),
        "transformers": StackRow(_format(transformers, TRANSFORMERS, "windows", "target modules"), "dflash"),
        "openvino": StackRow(_format(zlab, ZLAB), "dflash"),
        "lmdeploy": StackRow(Format(ZLAB.name, lmdeploy, ZLAB, _LMDEPLOY, facts), "dflash"),
        "official": StackRow(_format(zlab, ZLAB, *AUTHORS), CODE),
    },
    "jetspec": {
        "vllm": StackRow(_jetspec(*VLLM), "dflash"),
        "sglang": StackRow(_jetspec(*SGLANG), "DFLASH"),
        **dict.fromkeys(("trtllm", "openvino", "lmdeploy"), NO_CAUSAL),
        "speculators": "its flag for causal blocks is only of layers with sliding windows",
        "transformers": "its DFlash has no key for causal blocks: slots see their whole block",
        "official": StackRow(_jetspec("causal"), CODE),
    },
}
