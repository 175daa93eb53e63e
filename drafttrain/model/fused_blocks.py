"""All blocks of a Llama-like model in one call, over few new positions: nothing of a step runs in Python between two layers.

Shapes: B rows, N new positions, H hidden, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.model.attention import Heads, Step
from drafttrain.ops import library


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """norm before attention, packed projections (`ops.linear.pack`) and their biases, norm before the MLP."""

    norm_H: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm2_H: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    shape: Heads


class Blocks:
    """A frozen model's blocks, held by the compiled operators. The twin of `run` is the model's own loop over its blocks."""

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

    def run(self, x_BNH: Tensor, step: Step, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None, dict[int, Tensor]]:
        """(x, delta, tapped block outputs): the last block's output is x + delta. x is changed in place."""
        kv = step.kv
        assert kv is not None and step.compiled
        tapped = x_BNH.new_empty(len(taps), *x_BNH.shape)
        delta_BNH = torch.ops.drafttrain.run_blocks(
            self._kept.number, x_BNH, step.cos_MD, step.sin_MD, self.eps, self.head_eps, self.scale, self.windows,
            step.position_BN, kv.table_BQ, kv.length_B, step.ancestor_BNN, kv.store,
            torch.tensor(taps, dtype=torch.long), tapped,
        )  # fmt: skip
        return x_BNH, delta_BNH if delta_BNH.numel() else None, dict(zip(taps, tapped, strict=True))
