"""From a draft vocabulary to the target's: laws, logits and tokens.

There is no kernel: zeros for V entries and a scatter of the few drafted ones are all that has to be written, each once, by
torch's own kernels; and `top` renames what it finds by itself.

Shapes: V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def remap_law(q_Vd: Tensor, ids_Vd: Tensor, vocab: int) -> Tensor:
    """[..., V]: entry ids[i] is entry i of q [..., Vd], all others zero. Every id stands once."""
    return q_Vd.new_zeros(*q_Vd.shape[:-1], vocab).index_copy(-1, ids_Vd, q_Vd)


def remap_logits(logits_Vd: Tensor, ids_Vd: Tensor, vocab: int) -> Tensor:
    """[..., V]: as `remap_law`, with minus infinity for all others."""
    return logits_Vd.new_full((*logits_Vd.shape[:-1], vocab), -torch.inf).index_copy(-1, ids_Vd, logits_Vd)


def remap_token(token: Tensor, ids_Vd: Tensor) -> Tensor:
    """Target ids of draft ids, of any shape."""
    return ids_Vd[token]
