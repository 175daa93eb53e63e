"""A drafter's own vocabulary in files: d2t as offsets (target id = i + d2t[i]), t2d as marks of the target's tokens.

Shapes: D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.format import ConvertedDrafter
from drafttrain.export.target_ends import TRAINED_FOR, same_size

TYPES = {"d2t": torch.int64, "t2d": torch.bool}  # that loaders take
ROWED = ("lm_head.weight", "markov_head.markov_w2.weight")  # tensors with a row for each draft token


def vocabulary_typed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A drafter's tensors, with the names of its own tokens, if it has them, in the types that loaders take."""
    return {name: x.to(TYPES[name]) if name in TYPES else x for name, x in tensors.items()}


def draft_vocab(found: ExternalCheckpoint, vocab: int) -> int | None:
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
    if not found.has("d2t"):
        return None
    d2t = found.tensors["d2t"]
    is_identity = not bool(d2t.any()) or torch.equal(d2t, torch.arange(len(d2t)))  # each token is itself, as offset or as id
    return None if rows == vocab and is_identity else rows


def store_vocabulary(draft: ConvertedDrafter) -> None:
    """Store d2t as ascending offsets, with the head's rows in their order, and t2d as bool, also where it is missing."""
    checkpoint, tensors, vocab = draft.found, draft.tensors, draft.target.shape.vocab_size
    if draft.options["draft_vocab"] is None:
        tensors.pop("d2t", None)
        if "t2d" in tensors and bool(tensors["t2d"].all()):
            del tensors["t2d"]
        return
    d2t = tensors["d2t"]
    if d2t.is_floating_point() or d2t.ndim != 1 or len(d2t) != draft.options["draft_vocab"]:
        raise UserError(
            f"{checkpoint.origin}: d2t is {d2t.dtype} {list(d2t.shape)}; whole numbers are needed, one for each of "
            f"{draft.options['draft_vocab']} draft tokens"
        )
    t2d = tensors.get("t2d")
    if t2d is not None and (t2d.is_floating_point() or list(t2d.shape) != [vocab]):
        raise UserError(f"{checkpoint.origin}: t2d is {t2d.dtype} {list(t2d.shape)}; bool [{vocab}] is needed")
    ids_D = _target_ids(draft, d2t.long(), None if t2d is None else t2d.bool())
    order_D = ids_D.argsort()
    if not torch.equal(ids_D[order_D], ids_D):
        draft.notes.append("d2t does not ascend: the rows of the head are sorted by the target's ids")
        for name in (name for name in ROWED if name in tensors):
            tensors[name] = tensors[name][order_D].contiguous()
        ids_D = ids_D[order_D]
    tensors["d2t"] = ids_D - torch.arange(len(ids_D))
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids_D, True)


def _target_ids(draft: ConvertedDrafter, d2t: Tensor, t2d: Tensor | None) -> Tensor:
    """[D] the target's ids in the order of the files, from offsets (target = i + d2t[i]) or from ids, which some converters
    write. Some trainers order them by how often they occur.

    Ids that could be both are offsets, as stacks read them.
    """
    vocab, checkpoint = draft.target.shape.vocab_size, draft.found
    for ids, absolute in ((d2t + torch.arange(len(d2t)), False), (d2t, True)):
        is_valid = len(ids.unique()) == len(ids) and int(ids.min()) >= 0 and int(ids.max()) < vocab
        if is_valid and (t2d is None or (int(t2d.sum()) == len(ids) and bool(t2d[ids].all()))):
            if absolute:
                draft.notes.append("d2t holds the target's ids; they are stored as offsets, as stacks read them")
            return ids
    expected_ids = "different ids of the target" if t2d is None else "the tokens that t2d marks"
    raise UserError(
        f"{checkpoint.origin}: d2t gives {expected_ids} neither as offsets nor as ids, of {vocab} tokens; {TRAINED_FOR}"
    )
