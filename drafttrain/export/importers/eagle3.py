"""EAGLE-3: the portable layout (`midlayer.*` or `layers.0.*`) and the layout of speculators.

Shapes: D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import (
    EMBEDDING,
    INNER,
    TRAINED_FOR,
    TYPE,
    ConvertedDrafter,
    Importer,
    is_shared,
    layer_options,
    same_size,
    speculators,
)
from drafttrain.export.layouts.eagle3 import IDS, SPECULATORS
from drafttrain.model.target import Target

MODULES = (  # fields of ModelOpt's eagle_config, their usual values, and why others are refused
    ("use_input_layernorm_in_first_layer", True, "but layers here norm their embedding"),
    ("use_last_layernorm", True, "but drafters here have a norm before the head"),
    ("use_mtp_layernorm", False, "but states here are normed in the layer alone"),
    ("next_layer_regular", True, "but here the layer alone reads the embedding"),
    ("parallel_draft_step", 1, "but drafters here give one draft a step"),
    ("parallel_draft_heads_num_layers", 1, "but drafters here give one draft a step"),
)
EMBED = "embed_tokens.weight"
ROWED = ("lm_head.weight", "markov_head.markov_w2.weight")  # tensors with a row for each draft token
OUTPUTS = "target_layer_ids"  # blocks whose outputs are read, as DeepSpec names them


def _portable(found: Foreign) -> bool:
    layered = found.has("midlayer.hidden_norm.weight") or found.has("layers.0.hidden_norm.weight")
    return found.has("fc.weight") and layered and TYPE not in found.config and not found.has("mask_hidden")


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    inside = (INNER,) if TYPE in found.config else ()
    inner = found.object(INNER) if inside else found.config
    layers = found.number("num_hidden_layers", *inside) if "num_hidden_layers" in inner else 1
    own = {"layers": layers, "own_embedding": bool(own_embedding(found, target))}
    return shared_options(found, inner, target) | own | {"norm_output": norm_output(found)}


def own_embedding(found: Foreign, target: Target) -> tuple[str, ...]:
    """The embedding's tensor, where the drafter has one that is not the target's."""
    given, of = found.tensors.get(EMBED), target.shape
    if given is None or list(given.shape) != [of.vocab_size, of.hidden_size] or is_shared(given, EMBEDDING, target):
        return ()
    return (EMBED,)


def _check_module(found: Foreign) -> None:
    """Raise UserError for modules that ModelOpt can put around the layer."""
    eagle = found.config.get("eagle_config") or {}
    for key, usual, why in MODULES:
        found.wants(key, eagle.get(key, usual), (usual, None), why)


def shared_options(found: Foreign, inner: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The options that P-EAGLE has too. inner: the fields of the layers."""
    config = found.config
    same_size(found, "target_hidden_size", config.get("target_hidden_size"), target.shape.hidden_size)
    same_size(found, "num_target_layers", config.get("num_target_layers"), target.shape.blocks)
    layers = layer_inputs(found, target.shape.blocks)
    _check_module(found)
    same_size(found, "num_aux_hidden_states", config.get("num_aux_hidden_states"), len(layers))
    return {
        "taps": [k - 1 for k in layers],
        "draft_vocab": draft_vocab(found, target.shape.vocab_size),
        "fc_norm": _flag(found, "fc_norm", found.has("fc_norm.0.weight")),
        "norm_before_fc": _flag(found, "norm_before_fc", found.has("input_norm.weight")),
        "qk_norm": any(name.endswith(".self_attn.q_norm.weight") for name in found.kinds),
        "norm_before_residual": _flag(found, "norm_before_residual"),
        "layer": layer_options(found, inner, target, "qwen3" if inner.get("model_type") == "qwen3" else "llama"),
    }


def layer_inputs(found: Foreign, blocks: int) -> list[int]:
    """The blocks whose inputs are read, from where stacks look: k at the top level, k - 1 in eagle_config and in DeepSpec's
    target_layer_ids; by default 2, n // 2, n - 3.
    """
    config, eagle = found.config, found.config.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise UserError(f"{found.origin}: eagle_config is {eagle!r}; an object is needed")
    found.wants("use_aux_hidden_state", eagle.get("use_aux_hidden_state", True), (True,), "which is no EAGLE-3")
    given = {IDS: _ids(found, IDS, config), f"{IDS} in eagle_config": _ids(found, IDS, eagle, 1)}
    given |= {OUTPUTS: _ids(found, OUTPUTS, config, 1)}
    named = {key: ids for key, ids in given.items() if ids is not None}
    layers = next(iter(named.values()), [2, blocks // 2, blocks - 3])
    if any(ids != layers for ids in named.values()):
        said = ", ".join(f"{key} means {ids}" for key, ids in named.items())
        raise UserError(f"{found.origin}: its layer ids contradict each other, as inputs of blocks: {said}; correct one")
    if any(not 1 <= k <= blocks for k in layers) or len(set(layers)) != len(layers):
        ids = f"its layer ids are {layers}" if named else f"it names no layer ids, and the usual ones are {layers}"
        raise UserError(
            f"{found.origin}: {ids}; of a target of {blocks} blocks, 1 to {blocks} can be read, once each; {TRAINED_FOR}"
        )
    return layers


def _ids(found: Foreign, key: str, holder: Mapping[str, Any], more: int = 0) -> list[int] | None:
    """The blocks whose inputs are read; None where there is no such field. more: what stacks add to it."""
    given = holder.get(key)
    if given is None:
        return None
    if not isinstance(given, list) or not given or not all(isinstance(k, int) and not isinstance(k, bool) for k in given):
        raise UserError(f"{found.origin}: {key} is {given!r}; a list of numbers is needed")
    return [k + more for k in given]


def _flag(found: Foreign, key: str, default: bool = False) -> bool:
    value = found.config.get(key)
    return default if value is None else found.flag(key, value)


def norm_output(found: Foreign) -> bool:
    """Whether the normed state goes to the next step, as the two keys that there are say it."""
    given = {"norm_output": found.config.get("norm_output")}
    given["return_hidden_post_norm"] = (found.config.get("eagle_config") or {}).get("return_hidden_post_norm")
    flags = {found.flag(key, value) for key, value in given.items() if value is not None}
    if len(flags) > 1:
        raise UserError(f"{found.origin}: norm_output and eagle_config's return_hidden_post_norm differ; correct one of them")
    return flags.pop() if flags else False


def draft_vocab(found: Foreign, vocab: int) -> int | None:
    """The size of the drafter's own vocabulary; None: the target's."""
    if not found.has("lm_head.weight"):
        raise UserError(f"{found.origin}: {found.weights} lacks lm_head.weight; drafters without a head are not supported")
    rows = len(found.tensors["lm_head.weight"])
    size = found.config.get("draft_vocab_size")
    if size is not None and size != rows:
        raise UserError(f"{found.origin}: draft_vocab_size is {size}, lm_head.weight has {rows} rows; correct config.json")
    if rows > vocab:
        same_size(found, "vocabulary", rows, vocab)
    if rows < vocab and not found.has("d2t"):
        raise UserError(
            f"{found.origin}: it drafts {rows} of this target's {vocab} tokens, but has no d2t that names them; {TRAINED_FOR}"
        )
    whole = rows == vocab and found.has("d2t") and not bool(found.tensors["d2t"].any())  # each token is itself
    return rows if found.has("d2t") and not whole else None


def mend(draft: ConvertedDrafter) -> None:
    """Note what is not said, and store the vocabulary in our form."""
    found = draft.found
    if draft.options.get("own_embedding"):
        draft.notes.append(f"{EMBED} is not this target's embedding: it is the drafter's own")
    if found.config.get(TYPE) and "norm_before_residual" not in found.config:
        draft.notes.append("config.json does not say norm_before_residual: false, as speculators takes it (vLLM takes true)")
    store_vocabulary(draft)


def store_vocabulary(draft: ConvertedDrafter) -> None:
    """Store d2t as ascending offsets, with the head's rows in their order, and t2d as bool, also where it is missing."""
    found, tensors, vocab = draft.found, draft.tensors, draft.target.shape.vocab_size
    if draft.options["draft_vocab"] is None:
        tensors.pop("d2t", None)
        if "t2d" in tensors and bool(tensors["t2d"].all()):
            del tensors["t2d"]
        return
    d2t = tensors["d2t"]
    if d2t.is_floating_point() or d2t.ndim != 1 or len(d2t) != draft.options["draft_vocab"]:
        raise UserError(
            f"{found.origin}: d2t is {d2t.dtype} {list(d2t.shape)}; whole numbers are needed, one for each of "
            f"{draft.options['draft_vocab']} draft tokens"
        )
    marked = tensors.get("t2d")
    if marked is not None and (marked.is_floating_point() or list(marked.shape) != [vocab]):
        raise UserError(f"{found.origin}: t2d is {marked.dtype} {list(marked.shape)}; bool [{vocab}] is needed")
    ids_D = _target_ids(draft, d2t.long(), None if marked is None else marked.bool())
    order_D = ids_D.argsort()
    if not torch.equal(ids_D[order_D], ids_D):
        draft.notes.append("d2t does not ascend: the rows of the head are sorted by the target's ids")
        for name in (name for name in ROWED if name in tensors):
            tensors[name] = tensors[name][order_D].contiguous()
        ids_D = ids_D[order_D]
    tensors["d2t"] = ids_D - torch.arange(len(ids_D))
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids_D, True)


def _target_ids(draft: ConvertedDrafter, d2t: Tensor, marked: Tensor | None) -> Tensor:
    """[D] the target's ids in the order of the files, from offsets (target = i + d2t[i]) or from ids, which some converters
    write. Some trainers order them by how often they occur.

    Ids that could be both are offsets, as stacks read them.
    """
    vocab, found = draft.target.shape.vocab_size, draft.found
    for ids, absolute in ((d2t + torch.arange(len(d2t)), False), (d2t, True)):
        apart = len(ids.unique()) == len(ids) and int(ids.min()) >= 0 and int(ids.max()) < vocab
        if apart and (marked is None or (int(marked.sum()) == len(ids) and bool(marked[ids].all()))):
            if absolute:
                draft.notes.append("d2t holds the target's ids; they are stored as offsets, as stacks read them")
            return ids
    why = "different ids of the target" if marked is None else "the tokens that t2d marks"
    raise UserError(f"{found.origin}: d2t gives {why} neither as offsets nor as ids, of {vocab} tokens; {TRAINED_FOR}")


SHARED = {EMBED: EMBEDDING}
ROWS = [
    Importer("portable", "eagle3", _portable, _options, SPECULATORS, SHARED, mend, own=own_embedding),
    Importer("speculators", "eagle3", speculators("eagle3"), _options, SPECULATORS, SHARED, mend, own=own_embedding),
]
