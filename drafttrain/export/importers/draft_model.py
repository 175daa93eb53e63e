"""Draft models: a directory of transformers, and a peft adapter of one.

Their weights go into the checkpoint; configuration and tokenizer are read where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign, listed
from drafttrain.export.importers.row import Draft, Importer
from drafttrain.export.layouts.draft_model import ADAPTED, RENAMES
from drafttrain.export.layouts.peagle import MASK
from drafttrain.export.layouts.renames import Renames
from drafttrain.model.target import Target

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
MODELS = ("ForCausalLM", "LMHeadModel")
PLACES = ("source", "path", "revision", "hidden_size")
WHOLE = ("model.safetensors", "pytorch_model.bin")
PLAIN = {"bias": ("none", None), "use_dora": (False, None), "use_rslora": (False, None), "fan_in_fan_out": (False, None)}
EMPTY = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "trainable_token_indices")


def whole_model(found: Foreign) -> bool:
    """Heads and layers of drafters call themselves language models too; those have an `fc`, and no embedding's prefix."""
    named = found.config.get("architectures") or [""]
    inside = any(name.endswith(EMBEDDINGS) for name in found.kinds)
    whole = found.weights in WHOLE and str(named[0]).endswith(MODELS) and inside
    return whole and not found.has("fc.weight")


def _plain(found: Foreign) -> bool:
    """Not one that drafts from masks."""
    return whole_model(found) and MASK not in found.config


def _adapter(found: Foreign) -> bool:
    return found.config_name == "adapter_config.json"


def renames(found: Foreign) -> Renames:
    return RENAMES


def _adapter_renames(found: Foreign) -> Renames:
    return ADAPTED


def options(found: Foreign, target: Target) -> dict[str, Any]:
    return _from(str(found.directory.resolve()))


def _from(path: str, rank: int = 0, alpha: int = 16) -> dict[str, Any]:
    own = {"source": "hf", "path": path, "revision": None, "hidden_size": None}
    return own | {"lora_rank": rank, "lora_alpha": alpha}


def _adapter_options(found: Foreign, target: Target) -> dict[str, Any]:
    """The model is where the adapter says; one that was exported beside it, with `base` in this directory."""
    found.wants("peft_type", found.field("peft_type"), ("LORA",), "and draft models here are adapted by LoRA")
    for key, allowed in PLAIN.items():
        found.wants(key, found.config.get(key), allowed, "and adapters here are plain LoRA")
    for key in EMPTY:
        found.wants(
            key, found.config.get(key) or None, (None, "nothing"), "and adapters here have one rank and no other weights"
        )
    alpha = found.field("lora_alpha")
    if not isinstance(alpha, int | float) or int(alpha) != alpha:
        raise UserError(f"{found.origin}: lora_alpha is {alpha!r}; a whole number is needed")
    beside = found.directory.resolve() / "base"
    base = str(beside) if (beside / "config.json").is_file() else str(found.field("base_model_name_or_path"))
    return _from(base, found.number("r"), int(alpha))


def complete(draft: Draft, own: Mapping[str, Tensor]) -> None:
    """A tied head is stored once; an embedding of another size than the target's was brought to it when the model was read."""
    tensors, model = draft.tensors, draft.found.directory
    if not own:
        draft.notes.append(f"another tokenizer than the target's: its drafts go over as text, and its weights stay in {model}")
        tensors.clear()
        return
    if draft.found.config.get("tie_word_embeddings"):
        _tie(draft, own)
    for name, tensor in own.items():
        given = tensors.get(name)
        padded = given is not None and given.ndim == 2 and given.shape[1:] == tensor.shape[1:] and given.shape != tensor.shape
        if padded and given is not None and bool(tensor.isfinite().all()):
            tensors[name] = tensor.to(given.dtype)


def _tie(draft: Draft, own: Mapping[str, Tensor]) -> None:
    """A head that is the embedding may be there or not; one that is another would be lost."""
    tensors = draft.tensors
    (embedding,) = [name for name in tensors if name.endswith(EMBEDDINGS)]
    head = next((name for name in own if name.endswith("lm_head.weight")), None)
    if head is None:
        return
    if head in tensors and not torch.equal(tensors[head], tensors[embedding]):
        raise UserError(
            f"{draft.found.origin}: config.json says tie_word_embeddings, and lm_head.weight is not the embedding; "
            "set tie_word_embeddings to false there, or take the matrix out"
        )
    tensors[head] = tensors[embedding]


def _complete_adapter(draft: Draft, own: Mapping[str, Tensor]) -> None:
    """The model's own weights are read from where it lies; maps that the adapter leaves out get fresh matrices, which change
    nothing."""
    given = set(draft.tensors)
    strange = sorted(given - own.keys())
    matrices = {name for name in own if ".lora_" in name}
    if not matrices:
        raise UserError(
            f"{draft.found.origin}: its base model has another tokenizer than the target and drafts as it is; "
            "give checkpoint= the base model"
        )
    if not all(bool(x.isfinite().all()) for name, x in own.items() if ".lora_" not in name):
        raise UserError(
            f"{draft.found.origin}: its base model {draft.options['path']!r} has no safetensors weights; put them there"
        )
    if not strange and (fresh := sorted(matrices - given)):
        draft.notes.append(f"the adapter has no matrices for {listed(fresh)}: fresh ones, which change nothing")
    draft.tensors |= {name: tensor for name, tensor in own.items() if name not in given}


ROWS = [
    Importer("transformers", "draft_model", _plain, options, renames, complete=complete, places=PLACES),
    Importer(
        "peft adapter",
        "draft_model",
        _adapter,
        _adapter_options,
        _adapter_renames,
        complete=_complete_adapter,
        places=PLACES,
    ),
]
