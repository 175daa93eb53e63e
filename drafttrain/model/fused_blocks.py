"""All blocks of a Llama-like model in one compiled call, over few new positions.

Shapes: B rows, N new positions, H hidden, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.model.attention import AttentionMetadata, Heads
from drafttrain.ops import library


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One block's weights; its projections are packed by `ops.linear.pack`."""

    norm_H: Tensor | None  # before attention; None: the block is given the input of its projections
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm2_H: Tensor  # before the MLP
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    shape: Heads


class Blocks:
    """A frozen model's blocks, whose weights the compiled operators hold. The twin of `run` is the loop over the blocks."""

    def __init__(self, blocks: Sequence[BlockWeights], eps: float) -> None:
        first = blocks[0].shape
        self.eps, self.scale = eps, first.scale
        self.head_eps = 0.0 if first.q_norm is None else first.q_norm.variance_epsilon
        self.windows = torch.tensor([b.shape.window or 0 for b in blocks])
        tensors: list[Tensor | None] = []
        for b in blocks:
            q_norm, k_norm = (None if m is None else m.weight for m in (b.shape.q_norm, b.shape.k_norm))
            tensors += [b.norm_H, b.qkv, b.qkv_bias, q_norm, k_norm, b.out, b.out_bias]
            tensors += [b.norm2_H, b.gate_up, b.gate_up_bias, b.down, b.down_bias]
        self._kept = library.KeptWeights(tensors)
        self._taps: dict[tuple[int, ...], Tensor] = {}  # block numbers as tensors, made once: captured passes bring no data

    def run(
        self, x_BNH: Tensor, meta: AttentionMetadata, taps: tuple[int, ...] = (), read_BNI: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, dict[int, Tensor]]:
        """(x, delta, tapped block outputs): the last block's output is x + delta. x is changed in place.

        read_BNI: input of the first block's projections; None: the norm of x.
        """
        pages = meta.pages
        assert pages is not None and meta.compiled
        if taps not in self._taps:
            self._taps[taps] = torch.tensor(taps, dtype=torch.long)
        tapped = x_BNH.new_empty(len(taps), *x_BNH.shape)
        delta_BNH = torch.ops.drafttrain.run_blocks(
            self._kept.number, x_BNH, read_BNI, meta.cos_MD, meta.sin_MD, self.eps, self.head_eps, self.scale, self.windows,
            meta.position_BN, pages.table_BQ, pages.rows.length_B, meta.seen, meta.earlier, pages.store,
            self._taps[taps], tapped,
        )  # fmt: skip
        return x_BNH, delta_BNH if delta_BNH.numel() else None, dict(zip(taps, tapped, strict=True))
