"""Logits of a draft vocabulary, or of candidates, as logits of the target's vocabulary.

There is no kernel: torch's own kernels already write each entry once. `top` renames its results itself.

Shapes: V target vocabulary, Vd draft vocabulary, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor


def remap_logits(logits_Vd: Tensor, ids_Vd: Tensor, vocab: int) -> Tensor:
    """[..., V]: entry ids[i] is entry i of the logits [..., Vd]; all others are minus infinity. The ids are all different."""
    return logits_Vd.new_full((*logits_Vd.shape[:-1], vocab), -torch.inf).index_copy(-1, ids_Vd, logits_Vd)


def over_vocabulary(value_C: Tensor, token_C: Tensor, vocab: int, rest: float = -torch.inf) -> Tensor:
    """[..., V]: at each token its value; `rest` elsewhere. The tokens of a row are all different."""
    return value_C.new_full((*value_C.shape[:-1], vocab), rest).scatter(-1, token_C, value_C)
