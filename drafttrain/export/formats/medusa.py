"""Medusa: vLLM's layout, and the authors' names in the form that text-generation-inference reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.format import ENGINE_ENDED, ConvertedDrafter, Format, Importer, Renames, Rows, StackRow, compiled
from drafttrain.export.target_ends import same_size
from drafttrain.model.target import Target

VLLM = Renames(
    {"heads.{i}.blocks.{j}.linear.{part}": "blocks.{i}.layers.{j}.{part}", "heads.{i}.output.weight": "lm_heads.{i}.weight"}
)


def official_names(layers: int) -> Renames:
    """The names in the authors' layout, where a head is a sequence: its blocks, then the output matrix."""
    return Renames(
        {
            "heads.{i}.blocks.{j}.linear.{part}": "{i}.{j}.linear.{part}",
            "heads.{i}.output.weight": f"{{i}}.{layers}.weight",
        }
    )


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    target_dtype = str(source.opened.loaded.target.dtype).removeprefix("torch.")
    if source.options["init"] == "share" and source.dtype not in (target_dtype, "float32"):
        return f"its heads share the target's output matrix, which is {target_dtype}; export with dtype={target_dtype}"
    return None


def vllm(source: ExportSource) -> Files:
    """vLLM's layout."""
    shape, options = source.shape, source.options
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "num_heads": options["heads"],
        "num_hidden_layers": options["layers"],
        "medusa_fc_bias": True,
        "torch_dtype": source.dtype,
    }
    return Files(config, _tensors(source, VLLM))


def official(source: ExportSource) -> Files:
    """The authors' names in a safetensors file. It has no `architectures`, because text-generation-inference takes a directory
    with them for a model.

    `hidden_size` and `medusa_fc_bias` let vLLM 0.32 load it too.
    """
    options = source.options
    config = {
        "medusa_num_heads": options["heads"],
        "medusa_num_layers": options["layers"],
        "base_model_name_or_path": source.target_name,
        "hidden_size": source.shape.hidden_size,
        "medusa_fc_bias": True,
        "torch_dtype": source.dtype,
    }
    tensors = _tensors(source, official_names(options["layers"]))
    return Files(config, tensors, "medusa_lm_head.safetensors")


def _tensors(source: ExportSource, renames: Renames) -> dict[str, Tensor]:
    """Every head with its output matrix, which may be the target's."""
    output_names = {str(renames.theirs(f"heads.{head}.output.weight")) for head in range(source.options["heads"])}
    return dict.fromkeys(sorted(output_names), source.opened.target.head_weight) | renames.named(source.tensors)


def facts(source: ExportSource) -> dict[str, Any]:
    """The settings that a drafter must have again when it is read back."""
    return {"heads of the drafter": source.options["heads"]}


def _official(checkpoint: ExternalCheckpoint) -> Renames:
    """The names; the output matrix follows the blocks, so that its number is the number of blocks."""
    return official_names(_numbers(checkpoint, "0.{i}.linear.weight"))


def _numbers(checkpoint: ExternalCheckpoint, pattern: str) -> int:
    """The number of tensors with such a name."""
    return sum(compiled(pattern).fullmatch(name) is not None for name in checkpoint.kinds)


def _sizes(checkpoint: ExternalCheckpoint, target: Target) -> None:
    for key in ("vocab_size", "truncated_vocab_size"):
        same_size(checkpoint, key, checkpoint.config.get(key), target.shape.vocab_size)
    same_size(checkpoint, "hidden size", checkpoint.config.get("hidden_size"), target.shape.hidden_size)


def _vllm_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    _sizes(checkpoint, target)
    heads, layers = _numbers(checkpoint, "lm_heads.{i}.weight"), _numbers(checkpoint, "blocks.0.layers.{i}.weight")
    return {"heads": heads, "layers": layers, "init": "copy"}


def _official_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    _sizes(checkpoint, target)
    heads = _numbers(checkpoint, "{i}.0.linear.weight")
    return {"heads": heads, "layers": _numbers(checkpoint, "0.{i}.linear.weight"), "init": "copy"}


def _mend(draft: ConvertedDrafter) -> None:
    """Add zero biases to blocks without biases (vLLM's medusa_fc_bias). Share the target's matrix if all heads have it."""
    checkpoint, tensors, heads = draft.found, draft.tensors, draft.options["heads"]
    for key in ("medusa_num_heads", "num_heads"):
        _counted(checkpoint, key, heads, "heads", draft.notes)
    for key in ("medusa_num_layers", "num_hidden_layers"):
        _counted(checkpoint, key, draft.options["layers"], "blocks in a head", draft.notes)
    biases, weights = ([n for n in tensors if n.endswith(f"linear.{param_name}")] for param_name in ("bias", "weight"))
    if not biases and not checkpoint.config.get("medusa_fc_bias", False):
        for name in weights:
            tensors[name.replace("weight", "bias")] = tensors[name].new_zeros(len(tensors[name]))
    if biases and checkpoint.config.get("medusa_fc_bias") is False:
        raise UserError(f"{checkpoint.origin}: config.json says medusa_fc_bias false, but its blocks have biases; correct one")
    if checkpoint.exported("init") == "copy":  # heads that were not trained yet, or only in bits that the export rounded off
        return
    head_weight = draft.target.head_weight.detach().cpu()
    output_names = [f"heads.{i}.output.weight" for i in range(heads)]
    output_weights = [tensors.get(name) for name in output_names]
    if all(
        x is not None and x.shape == head_weight.shape and torch.equal(x.float(), head_weight.to(x.dtype).float())
        for x in output_weights
    ):
        draft.options["init"] = "share"
        for name in output_names:
            del tensors[name]


def _counted(checkpoint: ExternalCheckpoint, key: str, count: int, unit: str, notes: list[str]) -> None:
    """Note a number in the configuration that differs from the weights. Some published drafters have such."""
    config_count = checkpoint.config.get(key)
    if config_count is not None and config_count != count:
        notes.append(f"{checkpoint.config_name} says {key} {config_count}, its weights have {count} {unit}: {count} is used")


MEDUSA_MODEL = Importer("MedusaModel", "medusa", lambda f: f.has("lm_heads.0.weight"), _vllm_options, VLLM, mend=_mend)
LM_HEAD = Importer("medusa_lm_head", "medusa", lambda f: f.has("0.0.linear.weight"), _official_options, _official, mend=_mend)
IMPORTERS = [MEDUSA_MODEL, LM_HEAD]
ROWS: Rows = {
    "medusa": {
        "vllm": StackRow(
            Format(MEDUSA_MODEL.name, vllm, MEDUSA_MODEL, refuse, facts),
            "medusa",
            note="vLLM up to 0.32 loads Medusa heads; 0.33 no longer does.",
        ),
        "trtllm": ENGINE_ENDED,
        "tgi": StackRow(Format(LM_HEAD.name, official, LM_HEAD, refuse, facts)),
        "official": "its code reads a pickle alone, builds five heads whatever the files say, and drops output matrices",
    }
}
