"""llama.cpp's GGUF files: a draft model or a target, EAGLE-3, and the block drafters, which have one architecture, `dflash`.

Its loaders of EAGLE-3 and of block drafters take the embedding, and for blocks the head too, from the loaded target, without
the factor that some targets apply to the embedding, or the soft cap of their logits. Block drafters have fields for these, and
EAGLE-3 can bring an embedding of its own. All read the target's tokenizer from the drafter's file. The layer ids are k, blocks
whose inputs are read, for both; d2t holds the target's ids.

GGUF files are not imported. What is written is read back here by the same tables of names and fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import ParityError
from drafttrain.export import gguf_tokenizer as tokens
from drafttrain.export.block_fields import causal_layers, windows
from drafttrain.export.files import DTYPES, ExportSource, Files, Reads
from drafttrain.export.format import Format, ReadBack, Rows, StackRow
from drafttrain.export.formats import dflash, dflash2, dspark, eagle3
from drafttrain.export.formats import transformers as models
from drafttrain.export.gguf_file import ARCHITECTURE, FACTORS, FILE_TYPES, GgufFile, cast
from drafttrain.export.gguf_models import (
    KINDS,
    facts_of,
    halves,
    layer_facts,
    neighbours,
    ours,
    rope_of,
    rotates,
    scaling_fields,
    settings_of,
    shape_of,
    theirs,
    weights_of,
)
from drafttrain.export.golden import check_facts
from drafttrain.export.target_ends import EMBEDDING, embedding_scale, is_shared, logit_ends
from drafttrain.export.vocabulary import vocabulary_typed
from drafttrain.model.recurrent_state import TAPS
from drafttrain.model.shapes import LayerOptions, TargetShape

DRAFT, TARGET = "draft.gguf", "target.gguf"
EMBED = "token_embd.weight"
# targets whose blocks' inputs llama.cpp 11434 can capture, by the model type of their text part. Its models of two more kinds
# can too: their states are several streams (qwen4_exp), or a mean over streams (deepseek_v4), which are no blocks' outputs here
CAPTURED = (
    "llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss", "gemma4_text",
    "lfm2", "lfm2_moe", "minimax", "minimax_m2", "mimo_v2_flash", "nemotron_h", "hunyuan_v1_dense", "hunyuan_vl_text",
    "muse_glimmer_text",
)  # fmt: skip
TARGET_NOTE = (
    "`target.gguf` is the target as GGUF. Exporting `with_target=true` writes it here; llama.cpp's `convert_hf_to_gguf.py` "
    "makes it too."
)
ONE_AT_A_TIME = (
    "Build 11434 accepts far fewer drafts while it decodes several requests; add --parallel 1 to serve one at a time."
)


def refuse_eagle3(source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this drafter; None where it can."""
    return eagle3.refuse(source, frozenset({"norm_before_residual"})) or _refuse_states(source)


def refuse_block(own: Callable[[ExportSource, Reads], str | None], reads: Reads, source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this block drafter; None where it can. own, reads: the family's refusal and what it knows."""
    return _refuse_windows(source) or own(source, reads) or _refuse_states(source)


def refuse_dflash2(source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this drafter; None where it can. Of k candidates k (k + 1) numbers must fit a state."""
    pairs, width = source.options["candidates"] * (source.options["candidates"] + 1), source.shape.hidden_size
    if pairs > width:
        return (
            f"it has {source.options['candidates']} candidates, and llama.cpp takes k of them only where k (k + 1) is at most "
            f"the hidden size, {width}; train with fewer drafter.candidates"
        )
    return refuse_block(dflash2.refuse, READS | {"logit cap"}, source)


def refuse_model(source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this draft model; None where it can."""
    lm: Any = source.drafter.language_model()
    return models.refuse(source) or refuse_language_model(
        source, lm.model, [model_type for model_type in KINDS if KINDS[model_type].drafts]
    )


def refuse_target(source: ExportSource) -> str | None:
    """Why the target cannot be written; None where it can."""
    return refuse_language_model(source, source.target.model, list(KINDS))


def refuse_language_model(source: ExportSource, model: Any, able: list[str]) -> str | None:
    """Why the target or a draft model cannot be written with its tokenizer; None where it can. able: the kinds that can."""
    config = model.config
    if (weights := source.opened.loaded.description.get("weights")) is not None:
        return f"its weights are {weights}, but GGUF files need unquantised ones; leave out target.weights"
    if config.model_type not in able:
        return f"its architecture is {config.model_type}, but GGUF files can be written only for {', '.join(able)}"
    gguf_kind = KINDS[config.model_type]
    if not gguf_kind.biases and (getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False)):
        return "its linear maps have biases, but GGUF files can be checked only without them"
    if (rope_type := rope_of(config).get("rope_type", "default")) not in gguf_kind.scalings:
        return f"its rotary scaling is {rope_type!r}, for which llama.cpp has no field in {config.model_type} models"
    if not gguf_kind.windows and "sliding_attention" in (getattr(config, "layer_types", None) or [_window(config)]):
        return "it has sliding-window attention, which llama.cpp does not support for this architecture"
    return gguf_kind.refuse(config) or tokens.refuse(source.opened.loaded.tokenizer)


def eagle3_files(source: ExportSource) -> Files:
    """An EAGLE-3 drafter. d2t holds the target's ids. An embedding with a factor is written, with it."""
    tensors = vocabulary_typed(source.tensors)
    shape, d2t = source.layer_shape, tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    tensors = _renamed({name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}, shape, paired=True)
    if d2t is not None:
        tensors["d2t"] = d2t + torch.arange(len(d2t))  # the target's ids and not offsets
    eagle3_fields = {
        "target_layers": source.layer_inputs,
        "target_hidden_size": shape.hidden_size,
        "norm_before_residual": eagle3.before(source),
        "norm_before_fc": False,
    }
    if embedding_scale(source.target) is not None:
        tensors[EMBED] = source.embedded
    fields = _fields("eagle3", source, shape, 1) | _own("eagle3", eagle3_fields)
    return Files(fields, tensors, DRAFT, as_is=(EMBED,) if EMBED in tensors else ())


def dflash_files(source: ExportSource) -> Files:
    """A block drafter without a head of its own."""
    return _block_files(source)


def dspark_files(source: ExportSource) -> Files:
    """A block drafter with a Markov head and a confidence head. The rank is that of the tensors."""
    return _block_files(source, sample_from_anchor=source.options["slots"] == "shifted", has_confidence_head=True)


def dflash2_files(source: ExportSource) -> Files:
    """A block drafter with convolutions and a selector."""
    return _block_files(source, **dflash2.shapes(source))


def _block_files(source: ExportSource, **more: Any) -> Files:
    """The layer ids name the blocks that read the states, unlike in the authors' configuration. more: fields of the head."""
    shape, mask = source.layer_shape, dflash.mask_token(source)
    dflash_fields = {
        "block_size": source.options["block_size"],
        "target_layers": source.layer_inputs,
        "attention.causal": all(causal_layers(source)),
        **more,
    }
    if (scale := embedding_scale(source.target)) is not None:
        dflash_fields["embedding_scale"] = scale
    _, cap = logit_ends(source.target)
    if cap is not None:
        dflash_fields["final_logit_softcapping"] = cap
    fields = _fields("dflash", source, shape, source.options["layers"]) | _own("dflash", dflash_fields)
    fields["tokenizer.ggml.mask_token_id"] = mask
    return Files(fields, _renamed(source.tensors, shape, paired=False), DRAFT)


def model_files(source: ExportSource) -> Files:
    """A draft model."""
    lm: Any = source.drafter.language_model()
    return _language_model(source, lm.model, source.shape, models.merged(lm.model), DRAFT)


def target_files(source: ExportSource) -> Files:
    """The target, with its trained adapter merged."""
    target = source.opened.loaded.target
    return _language_model(source, target.model, target.shape, models.merged(target.model), TARGET)


def _language_model(source: ExportSource, model: Any, shape: TargetShape, weights: dict[str, Tensor], file: str) -> Files:
    config, gguf_kind = model.config, KINDS[model.config.model_type]
    stored_tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stored_tensors |= gguf_kind.storage.split(name.removeprefix("model."), tensor)
    fields = _fields(gguf_kind.architecture, source, shape, config.num_hidden_layers)
    fields |= _own(gguf_kind.architecture, {**gguf_kind.fields(config), **gguf_kind.fixed, **scaling_fields(config)})
    tensors = _renamed(stored_tensors, shape, gguf_kind.paired, gguf_kind.names)
    return Files(fields, tensors | _factors(model, shape), file)


def _factors(model: Any, shape: TargetShape) -> dict[str, Tensor]:
    """The tensor of factors of scaled rotary positions, for the kind that has one."""
    if rope_of(model.config).get("rope_type") != "llama3":
        return {}
    plain_F = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    return {FACTORS: plain_F / model.model.rotary_emb.inv_freq.float().cpu()}


def _fields(architecture: str, source: ExportSource, shape: TargetShape, blocks: int) -> dict[str, Any]:
    """Every field is written, even if llama.cpp has a default for it."""
    architecture_fields = {
        "vocab_size": shape.vocab_size,
        "context_length": shape.max_positions,
        "embedding_length": shape.hidden_size,
        "block_count": blocks,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": float(shape.norm_eps),
        "rope.freq_base": float(shape.rope_theta),
        "rope.dimension_count": shape.head_dim,
    }
    general_fields = {
        ARCHITECTURE: architecture,
        "general.name": f"{source.opened.meta.family} for {Path(source.target_name).name}",
        "general.file_type": FILE_TYPES[source.dtype],
    }
    loaded = source.opened.loaded
    tokenizer_fields = tokens.fields(loaded.tokenizer, loaded.target.shape.vocab_size, frozenset(loaded.target.stop_ids))
    return general_fields | _own(architecture, architecture_fields) | tokenizer_fields


def _own(architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _renamed(
    tensors: dict[str, Tensor], shape: TargetShape, paired: bool, names: dict[str, str] | None = None
) -> dict[str, Tensor]:
    """The tensors under llama.cpp's names. paired: reorder rows of queries and keys for rotating neighbours. names: a kind's
    own.
    """
    gguf_tensors = {}
    for name, tensor in tensors.items():
        if paired and rotates(name):
            tensor = neighbours(tensor, shape.head_dim)
        gguf_tensors[theirs(name, names or {})] = tensor
    return gguf_tensors


def _refuse_windows(source: ExportSource) -> str | None:
    """llama.cpp has fields for windows of block drafters. How many positions they count was not checked, so none is written."""
    if not any(windows(source)):
        return None
    return "its layers have sliding windows, which are not written to GGUF; train without drafter.layer.sliding_window"


def _refuse_states(source: ExportSource) -> str | None:
    model_type = _text(source).model_type
    if model_type not in CAPTURED:
        return f"llama.cpp captures no states of {model_type} targets, only of {', '.join(CAPTURED)}"
    if getattr(source.layer_shape, "rope_scaling", None) is not None:
        return "its layers have rotary scaling, which is not written to GGUF; train without drafter.layer.rope_scaling"
    return tokens.refuse(source.opened.loaded.tokenizer)


def _text(source: ExportSource) -> Any:
    """The configuration of the target's text part."""
    return source.target.model.config.get_text_config()


def _window(config: Any) -> str:
    return "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"


def read_eagle3(directory: Path, source: ExportSource) -> ReadBack:
    """An EAGLE-3 drafter in its file."""
    file = _opened(directory, DRAFT, "eagle3", source)
    shape, stored = shape_of(file), dict(file.tensors())
    file.expect("eagle3.target_hidden_size", source.shape.hidden_size, "config")
    file.expect("eagle3.norm_before_fc", False, "norm flags")
    _check_embedding(stored.pop(EMBED, None), source)
    ids_D = stored.pop("d2t", None)
    tensors = {}
    for name, tensor in stored.items():
        name = ours(name).replace("layers.0.", "midlayer.")
        tensors[name] = halves(tensor, shape.head_dim) if rotates(name) else tensor
    if ids_D is not None:
        tensors["d2t"] = ids_D - torch.arange(len(ids_D))
        tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(
            0, ids_D.clamp(0, shape.vocab_size - 1), True
        )
    options = {
        "target_layer_ids": _taps(file),
        "norm_before_residual": bool(file.own("norm_before_residual", "norm flags")),
        "draft_vocab": None if ids_D is None else len(ids_D),
    }
    return _read_back(source, file, options, tensors)


def read_block(directory: Path, source: ExportSource) -> ReadBack:
    """A block drafter in its file, with its head, if it has one."""
    file = _opened(directory, DRAFT, "dflash", source)
    options = {
        "target_layer_ids": _taps(file),
        "block_size": file.own("block_size", "block size"),
        "layers": file.own("block_count", "config"),
        "mask_token": file.get("tokenizer.ggml.mask_token_id", "mask token"),
        "causal": bool(file.own("attention.causal", "causal layers")),
    }
    if source.opened.meta.family == "dspark":
        options["slots"] = "shifted" if file.own("sample_from_anchor", "slots") else "in_place"
        file.expect("dflash.has_confidence_head", True, "config")
    if source.opened.meta.family == "dflash2":
        options |= {option: file.own(field, "config") for field, option in dflash2.SHAPES.items()}
        file.expect("dflash.conv_kernel_size", TAPS, "config")
    _check_ends(file, source)
    return _read_back(source, file, options, {ours(name): tensor for name, tensor in file.tensors()})


def read_model(directory: Path, source: ExportSource) -> ReadBack:
    """A draft model in its file. An adapter was merged into it."""
    model: Any = source.drafter.language_model()
    gguf_kind = KINDS[model.model.config.model_type]
    file = _opened(directory, DRAFT, gguf_kind.architecture, source)
    tensors = {f"lm.model.{name}": tensor for name, tensor in weights_of(file, gguf_kind)}
    _check_factors(tensors.pop(f"lm.model.{FACTORS}", None), model.model, source.shape)
    if model.model.config.tie_word_embeddings:
        tensors["lm.model.lm_head.weight"] = tensors["lm.model.model.embed_tokens.weight"]
    meta = source.opened.meta
    meta = replace(meta, options=meta.options | {"lora_rank": 0})
    return ReadBack(meta, tensors, settings_of(file, gguf_kind))


def _read_back(source: ExportSource, file: GgufFile, options: dict[str, Any], tensors: dict[str, Tensor]) -> ReadBack:
    """A drafter with layers of its own. options: what the file determines; the others are the checkpoint's."""
    shape = shape_of(file)
    file.expect(f"{file.architecture}.rope.dimension_count", shape.head_dim, "head_dim")
    layer = asdict(LayerOptions.between(shape, source.shape))
    meta = replace(source.opened.meta, options=source.options | options | {"layer": layer})
    return ReadBack(meta, tensors, layer_facts(shape))


def _opened(directory: Path, name: str, architecture: str, source: ExportSource) -> GgufFile:
    """A written file. Raises ParityError unless it is of this architecture, with the target's tokenizer."""
    file, tokenizer = GgufFile(directory / name), source.opened.loaded.tokenizer
    file.expect(ARCHITECTURE, architecture, "architecture")
    file.expect(f"{architecture}.vocab_size", source.shape.vocab_size, "vocabulary")
    file.expect(f"{architecture}.attention.value_length", file.own("attention.key_length", "head_dim"), "head_dim")
    tokens.check_tokenizer(file, source.shape.vocab_size, tokenizer.get_vocab(), tokens.encoded(tokenizer))
    return file


def _taps(file: GgufFile) -> list[int]:
    """The tapped blocks: those before the blocks whose inputs are read."""
    return [k - 1 for k in file.own("target_layers", "layer ids")]


def _check_embedding(stored: Tensor | None, source: ExportSource) -> None:
    """Raise ParityError unless a file has the target's embedding where it must have it, with the target's factor."""
    if stored is None and embedding_scale(source.target) is not None:
        raise ParityError("tensors", f"{EMBED} is missing, and the target multiplies its embedding by a factor")
    if stored is not None and not (stored.shape == source.embedding.shape and is_shared(stored, EMBEDDING, source.target)):
        raise ParityError("tensors", f"{EMBED} is not the target's embedding")


def _check_ends(file: GgufFile, source: ExportSource) -> None:
    """Raise ParityError unless a block drafter's fields have the target's factor on embeddings and its cap of logits."""
    expected_fields = {
        "embedding_scale": embedding_scale(source.target),
        "final_logit_softcapping": logit_ends(source.target)[1],
    }
    for name, value in expected_fields.items():
        actual = file.fields.get(f"dflash.{name}")
        if actual != value and (actual is None or value is None or not math.isclose(actual, value, rel_tol=1e-6)):
            raise ParityError(name.replace("_", " "), f"{file.file.name} has {actual}, the target has {value}")


def _check_factors(stored: Tensor | None, model: Any, shape: TargetShape) -> None:
    """Raise ParityError unless a file has the model's factors of rotary positions, where it needs any."""
    expected = _factors(model, shape).get(FACTORS)
    if stored is None or expected is None:
        if stored is not expected:
            raise ParityError("rope scaling", f"{FACTORS} is {'missing' if stored is None else 'not needed'}")
    elif not torch.equal(stored, expected):
        raise ParityError("rope scaling", f"{FACTORS} was not saved as it is")


def check_target(directory: Path, source: ExportSource) -> None:
    """Raise ParityError unless a target in its file has the target's settings and all its weights, bit for bit."""
    target = source.opened.loaded.target
    shape, model = target.shape, target.model
    gguf_kind = KINDS[model.config.model_type]
    file = _opened(directory, TARGET, gguf_kind.architecture, source)
    check_facts(settings_of(file, gguf_kind), layer_facts(shape) | facts_of(model.config, shape.head_dim))
    unchecked, rope_factors = models.merged(model), None
    for name, tensor in weights_of(file, gguf_kind):
        if name == FACTORS:
            rope_factors = tensor
        elif name not in unchecked or not torch.equal(tensor, cast(name, unchecked.pop(name), DTYPES[source.dtype]).float()):
            raise ParityError("target", f"{name} was not saved as it is")
    if unchecked:
        raise ParityError("target", f"{next(iter(unchecked))} was not saved")
    _check_factors(rope_factors, model, shape)


def model_facts(source: ExportSource) -> dict[str, Any]:
    """The settings that a draft model must have again when it is read back, beside those of its layers."""
    lm: Any = source.drafter.language_model()
    return facts_of(lm.model.config, lm.shape.head_dim)


def _block_row(
    write: Callable[[ExportSource], Files],
    refuse_family: Callable[[ExportSource, Reads], str | None],
    method: str = "draft-dflash",
) -> StackRow:
    gguf_format = Format("GGUF", write, read_block, partial(refuse_block, refuse_family, READS), dflash.facts)
    return StackRow(gguf_format, method, note=TARGET_NOTE)


READS = frozenset({"causal", "embedding scale"})
ROWS: Rows = {
    "eagle3": {
        "llamacpp": StackRow(
            Format("GGUF", eagle3_files, read_eagle3, refuse_eagle3, eagle3.facts),
            "draft-eagle3",
            note=f"{TARGET_NOTE} {ONE_AT_A_TIME}",
        )
    },
    "dflash": {"llamacpp": _block_row(dflash_files, dflash.refuse)},
    "dspark": {"llamacpp": _block_row(dspark_files, dspark.refuse, "draft-dspark")},
    "dflash2": {
        "llamacpp": StackRow(
            Format("GGUF", dflash2_files, read_block, refuse_dflash2, dflash.facts), "draft-dflash", note=TARGET_NOTE
        )
    },
    "jetspec": {"llamacpp": _block_row(dflash_files, dflash.jetspec_refuse)},
    "draft_model": {
        "llamacpp": StackRow(
            Format("GGUF", model_files, read_model, refuse_model, model_facts), "draft-simple", note=TARGET_NOTE
        )
    },
}
