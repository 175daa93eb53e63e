"""Medusa: the layouts of vLLM and of the authors."""

from __future__ import annotations

from typing import Any

import torch

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import ConvertedDrafter, Importer, counted, same_size
from drafttrain.export.layouts.medusa import VLLM, official_names
from drafttrain.export.layouts.renames import Renames, compiled
from drafttrain.model.target import Target


def _official(found: Foreign) -> Renames:
    """The names; the output matrix follows the blocks, so that its number is the number of blocks."""
    return official_names(_numbers(found, "0.{i}.linear.weight"))


def _numbers(found: Foreign, pattern: str) -> int:
    """The number of tensors with such a name."""
    return sum(compiled(pattern).fullmatch(name) is not None for name in found.kinds)


def _sizes(found: Foreign, target: Target) -> None:
    for key in ("vocab_size", "truncated_vocab_size"):
        same_size(found, key, found.config.get(key), target.shape.vocab_size)
    same_size(found, "hidden size", found.config.get("hidden_size"), target.shape.hidden_size)


def _vllm_options(found: Foreign, target: Target) -> dict[str, Any]:
    _sizes(found, target)
    heads, layers = _numbers(found, "lm_heads.{i}.weight"), _numbers(found, "blocks.0.layers.{i}.weight")
    return {"heads": heads, "layers": layers, "init": "copy"}


def _official_options(found: Foreign, target: Target) -> dict[str, Any]:
    _sizes(found, target)
    heads = _numbers(found, "{i}.0.linear.weight")
    return {"heads": heads, "layers": _numbers(found, "0.{i}.linear.weight"), "init": "copy"}


def _mend(draft: ConvertedDrafter) -> None:
    """Add zero biases to blocks without biases (vLLM's medusa_fc_bias). Share the target's matrix if all heads have it."""
    found, tensors, heads = draft.found, draft.tensors, draft.options["heads"]
    for key in ("medusa_num_heads", "num_heads"):
        counted(found, key, heads, "heads", draft.notes)
    for key in ("medusa_num_layers", "num_hidden_layers"):
        counted(found, key, draft.options["layers"], "blocks in a head", draft.notes)
    biases, weights = ([n for n in tensors if n.endswith(f"linear.{part}")] for part in ("bias", "weight"))
    if not biases and not found.config.get("medusa_fc_bias", False):
        for name in weights:
            tensors[name.replace("weight", "bias")] = tensors[name].new_zeros(len(tensors[name]))
    if biases and found.config.get("medusa_fc_bias") is False:
        raise UserError(f"{found.origin}: config.json says medusa_fc_bias false, but its blocks have biases; correct one")
    own = draft.target.head_weight.detach().cpu()
    outputs = [f"heads.{i}.output.weight" for i in range(heads)]
    given = [tensors.get(name) for name in outputs]
    if all(x is not None and x.shape == own.shape and torch.equal(x.float(), own.to(x.dtype).float()) for x in given):
        draft.options["init"] = "share"
        for name in outputs:
            del tensors[name]


ROWS = [
    Importer("MedusaModel", "medusa", lambda f: f.has("lm_heads.0.weight"), _vllm_options, VLLM, mend=_mend),
    Importer("medusa_lm_head", "medusa", lambda f: f.has("0.0.linear.weight"), _official_options, _official, mend=_mend),
]
