"""The largest entries of rows of logits, in the same order on every device; logits of a part of the vocabulary as those of all.

Shapes: M rows, V (target's) vocabulary, Vd draft vocabulary, C candidates, k choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import library

MOST = 64  # largest k of the compiled operator


def top(logits_MV: Tensor, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(value_Mk float32, index_Mk): largest first, the lower index first among equals; k = 1 is the argmax.

    NaN is the smallest, and both zeros are equal. Values are not rounded. ids, [V]: replaces the indices, for a draft
    vocabulary the target's ids. The compiled operator has no gradient.
    """
    if not (library.serves(logits_MV) and k <= MOST):
        return reference(logits_MV, k, ids)
    return _compiled("top", logits_MV, k, ids)


def top_log(logits_MV: Tensor, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `top`, with log-probabilities as values. None is above 0, so that no path gains by growing."""
    if not (library.serves(logits_MV) and k <= MOST):
        return reference_log(logits_MV, k, ids)
    return _compiled("top_log", logits_MV, k, ids)


def _compiled(name: str, logits_MV: Tensor, k: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result of one of the two compiled operators."""
    value_Mk = logits_MV.new_empty(len(logits_MV), k, dtype=torch.float32)
    index_Mk = logits_MV.new_empty(len(logits_MV), k, dtype=torch.long)
    getattr(torch.ops.drafttrain, name)(logits_MV.contiguous(), ids, value_Mk, index_Mk)
    return value_Mk, index_Mk


def reference_log(logits_MV: Tensor, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The twin of `top_log`."""
    value_Mk, index_Mk = top(logits_MV, k, ids)
    return (value_Mk - logits_MV.float().logsumexp(-1, keepdim=True)).clamp_max_(0.0), index_Mk


def reference(logits_MV: Tensor, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The plain-torch twin of `top`."""
    key_MV = keys(logits_MV)
    index_Mk = 2**32 - 1 - (key_MV.topk(k, -1).values & 2**32 - 1)
    value_Mk = logits_MV.float().gather(1, index_Mk)
    return value_Mk, index_Mk if ids is None else ids[index_Mk]


def keys(value_MV: Tensor) -> Tensor:
    """[M, V] int64, different within a row and in the order of `top`; the lower 32 bits hold the index, counted down.

    A positive float keeps its order when its bits are read as an integer; a negative float's order is reversed.
    """
    float_MV = value_MV.float() + 0.0  # -0 becomes 0
    bits_MV = float_MV.detach().view(torch.int32).long()
    order_MV = torch.where(bits_MV < 0, -(bits_MV + 2**31) - 1, bits_MV).masked_fill(float_MV.isnan(), -(2**31))
    index_V = torch.arange(value_MV.shape[-1], device=value_MV.device)
    return order_MV * 2**32 + (2**32 - 1 - index_V)


# no kernel for the next two: torch's own already write each entry once, and `top` renames its results itself
def remap_logits(logits_Vd: Tensor, ids_Vd: Tensor, vocab: int) -> Tensor:
    """[..., V]: entry ids[i] is entry i of the logits [..., Vd]; all others are minus infinity. The ids are all different."""
    return logits_Vd.new_full((*logits_Vd.shape[:-1], vocab), -torch.inf).index_copy(-1, ids_Vd, logits_Vd)


def over_vocabulary(value_C: Tensor, token_C: Tensor, vocab: int, rest: float = -torch.inf) -> Tensor:
    """[..., V]: at each token its value; `rest` elsewhere. The tokens of a row are all different."""
    return value_C.new_full((*value_C.shape[:-1], vocab), rest).scatter(-1, token_C, value_C)
