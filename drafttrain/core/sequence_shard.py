"""Sequences that several processes hold together, each its own positions (DeepSpeed Ulysses, arXiv 2309.14509).

Shapes: B rows, T positions of whole sequences, N processes, O = T / N positions of each, W = O + halo columns of its batch,
X anything along which processes hold parts, h heads, k = h / N of them, D head width.

Worked example: 8 positions, 2 processes, a halo of 2. What labels reach into is there twice.

    process 0     0 1 2 3 | 4 5
    process 1     4 5 6 7 | - -

All that is done position by position is done for W columns; attention takes the owners' alone, all T of them for k heads, and
gives each process its W columns back. Columns of the halo are as right as the owner's, and never a source.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Group(Protocol):
    """Processes that hold sequences together; every one of them makes the same calls in the same order."""

    rank: int
    size: int

    def to_heads(self, x_BXhD: Tensor) -> Tensor:
        """[B, N X, k, D]: all processes' parts, one after the other, of the heads that are this process's. Differentiable."""
        ...

    def to_positions(self, x_BXkD: Tensor) -> Tensor:
        """[B, X / N, h, D]: the inverse."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """own: positions of each process, O."""

    group: Group
    own: int
    halo: int

    @property
    def first(self) -> int:
        """The position of this process's first column."""
        return self.group.rank * self.own

    def gather(self, x_BhWD: Tensor) -> Tensor:
        """[B, k, T, D] of what every process has for its own columns."""
        return self.heads(x_BhWD[:, :, : self.own])

    def scatter(self, x_BkTD: Tensor) -> Tensor:
        """[B, h, W, D]: this process's columns of what all have for some heads."""
        padded_BkTD = F.pad(x_BkTD, (0, 0, 0, self.halo))
        width, starts = self.own + self.halo, range(0, x_BkTD.shape[2], self.own)
        return self.positions(torch.cat([padded_BkTD[:, :, start : start + width] for start in starts], 2))

    def heads(self, x_BhXD: Tensor) -> Tensor:
        """[B, k, N X, D]. Heads too few for every process are repeated, as those of keys may be."""
        repeats = self.group.size // gcd(x_BhXD.shape[1], self.group.size)
        whole_BhXD = x_BhXD if repeats == 1 else x_BhXD.repeat_interleave(repeats, 1)
        return self.group.to_heads(whole_BhXD.transpose(1, 2)).transpose(1, 2)

    def positions(self, x_BkXD: Tensor) -> Tensor:
        """[B, h, X / N, D]: the inverse."""
        return self.group.to_positions(x_BkXD.transpose(1, 2)).transpose(1, 2)
