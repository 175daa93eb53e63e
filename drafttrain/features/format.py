"""The stored form of the target's states: which tensors a position has, and their dtypes.

Shapes: N positions, B rows, T positions of a row, H hidden, k kept tokens, V vocabulary; `...` any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.model.batch import Top
from drafttrain.model.target import FINAL, Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = 1e-30  # lower bound of a row's magnitude, so that the scale of a row of zeros is a normal number
LOG_REST = "law.log_rest"
CHUNK = 1024  # positions whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor of a shard, [N, *shape]."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes per position."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FeatureFormat:
    """The states of `keys` (`Taps.keys`) in `format`.

    float8 is e4m3 with one float32 scale per position and state, which maps the largest magnitude to 448.
    """

    keys: tuple[int, ...]
    format: str
    hidden_size: int
    top: int = 0  # tokens whose log-probabilities are stored per position; 0: the final state is stored instead

    @property
    def columns(self) -> dict[str, Column]:
        """A shard's tensors by name."""
        columns = {}
        for key in self.keys:
            columns[name_of(key)] = Column(DTYPES[self.format], (self.hidden_size,))
            if self.format == "float8":
                columns[scale_of(key)] = Column(torch.float32)
        if self.top:
            columns |= {"law.id": Column(torch.int32, (self.top,)), "law.log_p": Column(torch.float32, (self.top,))}
            columns[LOG_REST] = Column(torch.float32)
        return columns

    @property
    def bytes(self) -> int:
        """Bytes per position."""
        return sum(column.bytes for column in self.columns.values())

    def encode(self, hidden: Mapping[int, Tensor], target: Target) -> dict[str, Tensor]:
        """The columns of N positions from the target's states, [N, H] each. The final state must be among them."""
        columns = {}
        for key in self.keys:
            state_NH = hidden[key]
            if self.format == "float8":
                scale_N = state_NH.float().abs().amax(-1).clamp_min(SMALLEST) / LARGEST
                state_NH, columns[scale_of(key)] = state_NH.float() / scale_N[:, None], scale_N
            columns[name_of(key)] = state_NH.to(DTYPES[self.format])
        if self.top:
            chunks = [self._top(target.head(final_CH)) for final_CH in hidden[FINAL].split(CHUNK)]
            columns |= {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        return columns

    def _top(self, logits_CV: Tensor) -> dict[str, Tensor]:
        """The k largest log-probabilities and the log of the remaining mass."""
        logits_CV = logits_CV.float()
        top_k = logits_CV.topk(self.top, -1)
        log_z_C = logits_CV.logsumexp(-1)
        log_rest_C = logits_CV.scatter(1, top_k.indices, -torch.inf).logsumexp(-1)
        return {"law.id": top_k.indices.int(), "law.log_p": top_k.values - log_z_C[:, None], LOG_REST: log_rest_C - log_z_C}

    def states(self, columns: Mapping[str, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        """The stored states by tap key, [..., H] each."""
        states = {}
        for key in self.keys:
            state_H = columns[name_of(key)]
            if self.format == "float8":
                state_H = state_H.float() * columns[scale_of(key)][..., None]
            states[key] = state_H.to(dtype)
        return states

    def top_k(self, columns: Mapping[str, Tensor]) -> Top | None:
        """The stored top-k distribution; None where the final state is stored instead."""
        return Top(columns["law.id"].long(), columns["law.log_p"], columns[LOG_REST]) if self.top else None


def name_of(key: int) -> str:
    """Column name of a tapped state."""
    return "final" if key == FINAL else f"block.{key}"


def scale_of(key: int) -> str:
    """Column name of a tapped state's float8 scales."""
    return f"{name_of(key)}.scale"
