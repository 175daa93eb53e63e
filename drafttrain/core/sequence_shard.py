"""Sequences split over processes by position (DeepSpeed Ulysses, arXiv 2309.14509), and modules that ZeRO-3 divides.

Shapes: B rows, T positions of whole sequences, N processes, O = T / N positions of each, W = O + halo columns of its batch,
X a dimension that is split over processes, h heads, k = h / N of them, D head width.

Worked example: 8 positions, 2 processes, a halo of 2. Labels reach into the halo, so its positions are in both batches.

    process 0     0 1 2 3 | 4 5
    process 1     4 5 6 7 | - -

Layers that work position by position process all W columns. Attention takes the owned columns of all processes, T positions
for k heads, and returns W columns to each process. Values in the halo equal the owner's; halo columns are never a source.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F


def is_part(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has left this process a part of the parameter: it is whole only while a forward of its module runs."""
    return hasattr(parameter, "ds_id")


def divided(module: nn.Module) -> bool:
    """Whether ZeRO-3 has divided any of its parameters among the processes (arXiv 1910.02054, section 5.3).

    Each call of such a module gathers its parameters from all processes. So all processes must call them in the same order and
    equally often, however many rows each of them has; otherwise they wait for each other, or take one parameter for another.
    """
    return any(map(is_part, module.parameters()))


def most_of_all(counts: Tensor) -> Tensor:
    """Each number's maximum over all processes. Every process calls it, with numbers of the same shape."""
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        counts = counts.clone()
        distributed.all_reduce(counts, distributed.ReduceOp.MAX)
    return counts


def pieces(module: nn.Module, rows: int, at_once: int, device: torch.device) -> list[slice]:
    """Slices of at most `at_once` rows; of a divided module as many in all processes: where rows are few the last are empty."""
    count = max(1, -(-rows // at_once))
    if divided(module):
        count = int(most_of_all(torch.tensor([count], device=device)))
    return [slice(min(rows, i * at_once), min(rows, (i + 1) * at_once)) for i in range(count)]


class Group(Protocol):
    """Processes that share sequences. All of them make the same calls in the same order."""

    rank: int
    size: int

    def to_heads(self, x_BXhD: Tensor) -> Tensor:
        """[B, N X, k, D]: the parts of all processes in order, for this process's heads. Differentiable."""
        ...

    def to_positions(self, x_BXkD: Tensor) -> Tensor:
        """[B, X / N, h, D]: the inverse of `to_heads`."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """This process's part of the sequences."""

    group: Group
    own: int  # positions of each process, O
    halo: int  # positions after them that labels reach into

    @property
    def first(self) -> int:
        """The position of this process's first column."""
        return self.group.rank * self.own

    def gather(self, x_BhWD: Tensor) -> Tensor:
        """[B, k, T, D]: the owned columns of all processes, for this process's heads."""
        return self.heads(x_BhWD[:, :, : self.own])

    def scatter(self, x_BkTD: Tensor) -> Tensor:
        """[B, h, W, D]: all heads, for this process's columns."""
        padded_BkTD = F.pad(x_BkTD, (0, 0, 0, self.halo))
        width, starts = self.own + self.halo, range(0, x_BkTD.shape[2], self.own)
        return self.positions(torch.cat([padded_BkTD[:, :, start : start + width] for start in starts], 2))

    def heads(self, x_BhXD: Tensor) -> Tensor:
        """[B, k, N X, D]: the parts of all processes for this process's heads. Too few heads (of keys) are repeated."""
        repeats = self.group.size // gcd(x_BhXD.shape[1], self.group.size)
        repeated_BhXD = x_BhXD if repeats == 1 else x_BhXD.repeat_interleave(repeats, 1)
        return self.group.to_heads(repeated_BhXD.transpose(1, 2)).transpose(1, 2)

    def positions(self, x_BkXD: Tensor) -> Tensor:
        """[B, h, X / N, D]: the inverse of `heads`."""
        return self.group.to_positions(x_BkXD.transpose(1, 2)).transpose(1, 2)

    def of_heads(self, x_h: Tensor | None) -> Tensor | None:
        """[k] this process's part of one number per head."""
        return None if x_h is None else x_h.chunk(self.group.size)[self.group.rank]
