"""DSpark: the authors' layout (DeepSpec), which serving stacks read, and speculators' layout.

The calibration of its confidences is not exported, because no loader reads one. `sample_from_anchor` is always written, because
loaders have different defaults.
"""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.causal import causal_key
from drafttrain.export.layouts.dflash import (
    block_fields,
    facts,
    mask_token,
    outputs,
    refuse_last,
    refuse_sorted,
    speculators_config,
    vocabulary_field,
    vocabulary_typed,
)
from drafttrain.export.layouts.target_ends import refuse_logits

INSIDE = ("mask_token_id", "target_layer_ids")  # fields that some stacks look for in `dflash_config`
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # in the authors' files: copies of the target's


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    if source.stack == "official" and source.options["slots"] != "shifted":
        return "its slots are in place, but the authors' code has shifted ones; train with drafter.slots=shifted"
    if source.stack == "trtllm" and source.options["slots"] != "shifted":
        return "its slots are in place, but TensorRT-LLM drafts with every slot of a block; train with drafter.slots=shifted"
    reason = refuse_sorted(source) or refuse_last(source, per_layer=source.stack == "speculators")
    return reason or refuse_logits(source)


def deepspec(source: ExportSource) -> Files:
    """The authors' layout. All fields are at the top level: vLLM looks for markov_rank only there.

    vLLM takes the number of layers for that of tapped blocks, unless `dflash_config` names these (pull request 48932).
    """
    key = causal_key(source)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **block_fields(source),
        **({} if key is None else {"is_causal": key}),
        "num_target_layers": source.shape.blocks,
        "mask_token_id": mask_token(source),
        "target_layer_ids": outputs(source),
        "sample_from_anchor": source.options["slots"] == "shifted",
        **vocabulary_field(source),
        **_heads(source),
    }
    if source.stack == "vllm":
        config["dflash_config"] = {key: config[key] for key in INSIDE}
    if source.stack != "official":
        return Files(config, vocabulary_typed(source), facts=facts(source))
    config["num_anchors"] = source.options["anchors"]  # a setting of training, without which the class is not built
    copies = {EMBEDDING: source.embedding, HEAD: source.opened.loaded.target.head_weight}
    return Files(config, source.tensors | copies, facts=facts(source), as_is=(EMBEDDING, HEAD))


def trtllm(source: ExportSource) -> Files:
    """The authors' layout, with what the target gives in `dflash_config` too, as in the files of TensorRT-LLM's own tests."""
    files = deepspec(source)
    files.config["dflash_config"] = {key: files.config[key] for key in INSIDE} | {"shift_label": True}
    return files


def speculators(source: ExportSource) -> Files:
    """speculators' layout."""
    config = speculators_config(source, "dspark", "DSparkSpeculator") | _heads(source)
    return Files(config, vocabulary_typed(source), facts=facts(source))


def _heads(source: ExportSource) -> dict[str, Any]:
    return {
        "markov_rank": source.options["rank"],
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
