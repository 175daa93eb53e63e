"""Draft models: a transformers directory, or a peft adapter of one.

The weights go into the checkpoint. Configuration and tokenizer are read from their own place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign, listed
from drafttrain.export.importers.row import ConvertedDrafter, Importer
from drafttrain.export.layouts.draft_model import ADAPTED, RENAMES
from drafttrain.export.layouts.peagle import MASK
from drafttrain.model.target import Target

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
MODELS = ("ForCausalLM", "LMHeadModel")
PLACES = ("source", "path", "revision", "hidden_size")
WHOLE = ("model.safetensors", "pytorch_model.bin")
FRESH = (True, False, None, "gaussian", "orthogonal", "eva")  # ways to begin that leave the base model as it was
PLAIN = {"init_lora_weights": FRESH, "bias": ("none", None)}
PLAIN |= dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out"), (False, None))
EMPTY = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "trainable_token_indices")


def whole_model(found: Foreign) -> bool:
    """Whether this is a language model. Some drafter heads and layers are named like one, but have an `fc` or no embedding."""
    named = found.architectures or [""]
    inside = any(name.endswith(EMBEDDINGS) for name in found.kinds)
    whole = found.weights in WHOLE and named[0].endswith(MODELS) and inside
    return whole and not found.has("fc.weight")


def _plain(found: Foreign) -> bool:
    """Whether it is a language model that does not draft from masks."""
    return whole_model(found) and MASK not in found.config


def _adapter(found: Foreign) -> bool:
    return found.adapter


def options(found: Foreign, target: Target) -> dict[str, Any]:
    """Options of a draft model in this directory."""
    return _from(str(found.directory.resolve()))


def _from(path: str, rank: int = 0, alpha: int = 16) -> dict[str, Any]:
    own = {"source": "hf", "path": path, "revision": None, "hidden_size": None}
    return own | {"lora_rank": rank, "lora_alpha": alpha}


def check_plain(found: Foreign) -> None:
    """Raise UserError for an adapter that is not LoRA's two matrices for each map, of one rank."""
    found.wants("peft_type", found.field("peft_type"), ("LORA",), "but models here are adapted by LoRA")
    for key, allowed in PLAIN.items():
        found.wants(key, found.config.get(key), allowed, "but adapters here are plain LoRA")
    for key in EMPTY:
        found.wants(
            key, found.config.get(key) or None, (None, "nothing"), "but adapters here have one rank and no other weights"
        )


def usual_lora() -> Mapping[str, Any]:
    """What peft takes for fields that are missing."""
    from peft import LoraConfig  # takes seconds, and few runs need it

    return LoraConfig().to_dict()


def _adapter_options(found: Foreign, target: Target) -> dict[str, Any]:
    """Options from the adapter's configuration. Its base model is in the folder `base`, if exported there, or where it says."""
    check_plain(found)
    alpha = found.field("lora_alpha")
    if not isinstance(alpha, int | float) or int(alpha) != alpha:
        raise UserError(f"{found.origin}: lora_alpha is {alpha!r}; a whole number is needed")
    inside = found.directory.resolve() / "base"
    base = str(inside) if (inside / "config.json").is_file() else str(found.field("base_model_name_or_path"))
    return _from(base, found.number("r"), int(alpha))


def complete(draft: ConvertedDrafter, own: Mapping[str, Tensor]) -> None:
    """Tie the head, and use the embedding that was resized to the target's vocabulary when the model was read."""
    tensors, model = draft.tensors, draft.found.directory
    if not own:
        draft.notes.append(f"its tokenizer is not the target's: drafts are passed as text, and its weights stay in {model}")
        tensors.clear()
        return
    if draft.found.config.get("tie_word_embeddings"):
        _tie(draft, own)
    for name, tensor in own.items():
        given = tensors.get(name)
        padded = given is not None and given.ndim == 2 and given.shape[1:] == tensor.shape[1:] and given.shape != tensor.shape
        if padded and given is not None and bool(tensor.isfinite().all()):
            tensors[name] = tensor.to(given.dtype)


def _tie(draft: ConvertedDrafter, own: Mapping[str, Tensor]) -> None:
    """Store the tied head once. A head that differs from the embedding raises UserError, because it would be lost."""
    tensors = draft.tensors
    (embedding,) = [name for name in tensors if name.endswith(EMBEDDINGS)]
    head = next((name for name in own if name.endswith("lm_head.weight")), None)
    if head is None:
        return
    if head in tensors and not torch.equal(tensors[head], tensors[embedding]):
        raise UserError(
            f"{draft.found.origin}: config.json says tie_word_embeddings, but lm_head.weight is not the embedding; "
            "set tie_word_embeddings to false there, or remove the matrix"
        )
    tensors[head] = tensors[embedding]


def _complete_adapter(draft: ConvertedDrafter, own: Mapping[str, Tensor]) -> None:
    """Add the base model's weights, and fresh matrices, which change nothing, where the adapter has none."""
    given = set(draft.tensors)
    strange = sorted(given - own.keys())
    matrices = {name for name in own if ".lora_" in name}
    if not matrices:
        raise UserError(
            f"{draft.found.origin}: its base model has another tokenizer than the target, so an adapter has no effect; "
            "set checkpoint= to the base model"
        )
    if not all(bool(x.isfinite().all()) for name, x in own.items() if ".lora_" not in name):
        raise UserError(
            f"{draft.found.origin}: its base model {draft.options['path']!r} has no safetensors weights; put them there"
        )
    if not strange and (fresh := sorted(matrices - given)):
        draft.notes.append(f"the adapter has no matrices for {listed(fresh)}: fresh ones are used, which change nothing")
    draft.tensors |= {name: tensor for name, tensor in own.items() if name not in given}


ROWS = [
    Importer("transformers", "draft_model", _plain, options, RENAMES, complete=complete, places=PLACES, usual=None),
    Importer(
        "peft adapter",
        "draft_model",
        _adapter,
        _adapter_options,
        ADAPTED,
        complete=_complete_adapter,
        places=PLACES,
        usual=usual_lora,
    ),
]
