"""Parallel residual heads on one state, and their most likely tokens, in one call (arXiv 2401.10774, section 2.1.1).

Shapes: K heads, B rows, R ranks, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.ops import library
from drafttrain.ops.top import top


class ResidualHeads:
    """K heads of residual blocks x + SiLU(W x + b), each with its own output matrix.

    blocks: (weight [K, H, H], bias [K, H]) of each layer. output_KVH: [K, V, H].
    """

    def __init__(self, blocks: Sequence[tuple[Tensor, Tensor]], output_KVH: Tensor) -> None:
        self.blocks, self.output_KVH = blocks, output_KVH
        self._weights = [*(tensor for block in blocks for tensor in block), output_KVH]

    def top(self, state_BH: Tensor, heads: int, ranks: int) -> Tensor:
        """[heads, B, ranks] the most likely tokens of the first `heads` heads, in order. One row on a CPU is compiled."""
        kinds = {(x.device.type, x.dtype) for x in (state_BH, self.output_KVH)}
        if len(state_BH) != 1 or kinds != {("cpu", torch.float32)} or not library.serves(state_BH):
            return self.reference(state_BH, heads, ranks)
        template = torch.empty(0, dtype=torch.long)
        token_ids: Tensor = torch.ops.drafttrain.top_of_heads(state_BH.contiguous(), self._weights, template, heads, ranks)
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
