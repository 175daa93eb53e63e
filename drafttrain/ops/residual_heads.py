"""Parallel residual heads on one state, and their most likely tokens, in one call (arXiv 2401.10774, section 2.1.1).

Shapes: K heads, B rows, R ranks, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.ops import library
from drafttrain.ops.linear import pack
from drafttrain.ops.top import top


class ResidualHeads:
    """K heads of residual blocks x + SiLU(W x + b), each with its own output matrix.

    blocks: (weight [K, H, H], bias [K, H]) of each layer. output_KVH: [K, V, H]. frozen: the weights will not change, so they
    may be packed in addition to the originals.
    """

    def __init__(self, blocks: Sequence[tuple[Tensor, Tensor]], output_KVH: Tensor, frozen: bool) -> None:
        self.blocks, self.output_KVH = blocks, output_KVH
        self._kept: library.KeptWeights | None = None
        fusable = frozen and output_KVH.dtype == torch.float32 and library.has_product()
        packed = [pack(w.flatten(0, 1)) for w in (*(weight for weight, _ in blocks), output_KVH)] if fusable else [None]
        if None not in packed:
            biases = [bias for _, bias in blocks]
            pairs = [tensor for pair in zip(packed, biases, strict=False) for tensor in pair]
            self._kept = library.KeptWeights([*pairs, packed[-1]])

    def top(self, state_BH: Tensor, heads: int, ranks: int) -> Tensor:
        """[heads, B, ranks] the most likely tokens of the first `heads` heads, in order.

        Only one row is compiled. With several rows the packed product would multiply each head's state with every head's
        matrices.
        """
        if self._kept is None or len(state_BH) != 1 or not library.serves(state_BH):
            return self.reference(state_BH, heads, ranks)
        template = torch.empty(0, dtype=torch.long)
        token_ids: Tensor = torch.ops.drafttrain.top_of_heads(
            self._kept.number, state_BH.contiguous(), template, heads, len(self.output_KVH), ranks
        )
        return token_ids[:, None]

    def reference(self, state_BH: Tensor, heads: int, ranks: int) -> Tensor:
        """The plain-torch twin of `top`."""
        return ranked(torch.bmm(residual(self.blocks, state_BH, heads), self.output_KVH[:heads].transpose(1, 2)), ranks)


def ranked(logits_KBV: Tensor, ranks: int) -> Tensor:
    """[heads, B, ranks] the most likely tokens in order, the lower id first among equals."""
    return top(logits_KBV.flatten(0, 1), ranks)[1].view(*logits_KBV.shape[:2], ranks)


def residual(blocks: Sequence[tuple[Tensor, Tensor]], state_BH: Tensor, heads: int) -> Tensor:
    """[heads, B, H]: the inputs of the first heads' output matrices."""
    x_KBH = state_BH.expand(heads, -1, -1)
    for weight_KHH, bias_KH in blocks:
        x_KBH = x_KBH + F.silu(torch.baddbmm(bias_KH[:heads, None], x_KBH, weight_KHH[:heads].transpose(1, 2)))
    return x_KBH
