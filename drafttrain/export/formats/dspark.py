"""DSpark: the authors' layout (DeepSpec), which serving stacks read, and speculators' layout.

Some files have the fields in `dflash_config`. The calibration of its confidences is not exported, because no loader reads one.
`sample_from_anchor` is always written, because loaders have different defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.block_fields import causal_key, field_of, number_of
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files, Reads
from drafttrain.export.format import SAME, ConvertedDrafter, Format, Importer, Renames, Rows, StackRow, wrapped
from drafttrain.export.formats.dflash import (
    PART,
    SGLANG,
    SHIFTED,
    SINKS,
    VLLM,
    block_fields,
    facts,
    mask_token,
    outputs,
    refuse_last,
    refuse_sorted,
    speculators_config,
    speculators_options,
    vocabulary_field,
    zlab_options,
)
from drafttrain.export.speculators import TYPE, speculators_type
from drafttrain.export.target_ends import refuse_logits
from drafttrain.export.vocabulary import store_vocabulary, vocabulary_typed
from drafttrain.model.target import Target

SHIFT = "shift_label"
CODE = "Qwen3DSparkModel.from_pretrained({directory!r})"
INSIDE = ("mask_token_id", "target_layer_ids", SINKS)  # fields that some stacks look for in `dflash_config`
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # in the authors' files: copies of the target's


def refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why a stack cannot load this drafter; None where it can. reads: as in `ROWS`."""
    if source.stack == "official" and source.options["slots"] != "shifted":
        return "its slots are in place, but the authors' code has shifted ones; train with drafter.slots=shifted"
    if source.stack == "trtllm" and source.options["slots"] != "shifted":
        return "its slots are in place, but TensorRT-LLM drafts with every slot of a block; train with drafter.slots=shifted"
    reason = refuse_sorted(source) or refuse_last(source, reads, per_layer=source.stack == "speculators")
    return reason or refuse_logits(source)


def deepspec(source: ExportSource) -> Files:
    """The authors' layout. All fields are at the top level: vLLM looks for markov_rank only there.

    vLLM takes the number of layers for that of tapped blocks, unless `dflash_config` names these (pull request 48932).
    """
    is_causal = causal_key(source)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **block_fields(source),
        **({} if is_causal is None else {"is_causal": is_causal}),
        "num_target_layers": source.shape.blocks,
        "mask_token_id": mask_token(source),
        "target_layer_ids": outputs(source),
        "sample_from_anchor": source.options["slots"] == "shifted",
        **vocabulary_field(source),
        **_heads(source),
    }
    if source.stack == "vllm":
        config["dflash_config"] = _inside(config)
    if source.stack != "official":
        return Files(config, vocabulary_typed(source.tensors))
    config["num_anchors"] = source.options["anchors"]  # a setting of training, without which the class is not built
    copies = {EMBEDDING: source.embedding, HEAD: source.opened.loaded.target.head_weight}
    return Files(config, source.tensors | copies, as_is=(EMBEDDING, HEAD))


def trtllm(source: ExportSource) -> Files:
    """The authors' layout, with what the target gives in `dflash_config` too, as in the files of TensorRT-LLM's own tests."""
    files = deepspec(source)
    files.config["dflash_config"] = _inside(files.config) | {"shift_label": True}
    return files


def speculators(source: ExportSource) -> Files:
    """speculators' layout."""
    config = speculators_config(source, "dspark", "DSparkSpeculator") | _heads(source)
    return Files(config, vocabulary_typed(source.tensors))


def _inside(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in INSIDE if key in config}


def _heads(source: ExportSource) -> dict[str, Any]:
    return {
        "markov_rank": source.options["rank"],
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


FLAT = Renames(  # Model-Optimizer's names
    {
        "markov_head.markov_{rest}": "markov_{rest}",
        "confidence_head.proj.{part}": "confidence_proj.{part}",
        "{rest}": "{rest}",
    }
)
WRAPPED = wrapped("markov_head", "confidence_head")
MARKOV = {"markov_head.markov_w1.weight": SAME, "markov_w1.weight": FLAT, "logit_head.markov_head.markov_w1.weight": WRAPPED}


def _knows(checkpoint: ExternalCheckpoint) -> bool:
    return any(checkpoint.has(name) for name in MARKOV) and TYPE not in checkpoint.config


def _names(checkpoint: ExternalCheckpoint) -> Renames:
    return next(names for name, names in MARKOV.items() if checkpoint.has(name))


def _deepspec_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    """Some files have `shift_label` for `sample_from_anchor`."""
    shifted, sample_from_anchor = checkpoint.flag(SHIFT, field_of(checkpoint, SHIFT, True)), field_of(checkpoint, SHIFTED)
    if field_of(checkpoint, SHIFT) is not None and sample_from_anchor not in (None, shifted):
        raise UserError(
            f"{checkpoint.origin}: {SHIFT} is {shifted} and {SHIFTED} {sample_from_anchor}, which contradict each other; "
            "correct one"
        )
    return zlab_options(checkpoint, target, shifted, part=True) | _head_options(checkpoint)


def _note(draft: ConvertedDrafter) -> None:
    """All loaders have the same default for these files, unlike for speculators'."""
    store_vocabulary(draft)
    if field_of(draft.found, SHIFTED) is None and field_of(draft.found, SHIFT) is None:
        draft.notes.append(f"{draft.found.config_name} does not say {SHIFTED}: true, as vLLM, SGLang and llama.cpp take it")


def _speculators_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    return speculators_options(checkpoint, target, shifted=None, part=True) | _head_options(checkpoint)


def _head_options(checkpoint: ExternalCheckpoint) -> dict[str, Any]:
    head_type = field_of(checkpoint, "markov_head_type", "vanilla")
    checkpoint.wants("markov_head_type", head_type, ("vanilla",), "but here the token before gives a plain bias")
    for key in ("enable_confidence_head", "use_confidence_head", "confidence_head_with_markov"):
        checkpoint.wants(
            key, field_of(checkpoint, key, True), (True,), "but the confidence here reads the state and the token before"
        )
    return {"rank": number_of(checkpoint, "markov_rank")}


DEEPSPEC = Importer("DeepSpec", "dspark", _knows, _deepspec_options, _names, **PART | {"mend": _note})
SPECULATORS = Importer("speculators", "dspark", speculators_type("dspark"), _speculators_options, **PART)
IMPORTERS = [DEEPSPEC, SPECULATORS]


def _format(write: Callable[[ExportSource], Files], importer: Importer, *reads: str) -> Format:
    """reads: what the stack is known to read, as in DFlash's rows."""
    return Format(importer.name, write, importer, partial(refuse, reads=frozenset(reads)), facts)


ROWS: Rows = {
    "dspark": {
        "vllm": StackRow(_format(deepspec, DEEPSPEC, *VLLM), "dspark", sinks=True),
        "sglang": StackRow(_format(deepspec, DEEPSPEC, *SGLANG), "DSPARK"),
        "trtllm": StackRow(_format(trtllm, DEEPSPEC), "DSpark"),
        "speculators": StackRow(_format(speculators, SPECULATORS, "windows", "draft_vocab"), "dspark"),
        "official": StackRow(_format(deepspec, DEEPSPEC), CODE),
    }
}
