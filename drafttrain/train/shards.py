"""Reads and writes the optimiser's state, in pieces that any number of processes at any ZeRO stage can read.

`optimizer-<rank>.safetensors` has the shards of one process: 1-D tensors named `<parameter>:<key>:<first element>`. The key is
`weight` (the master copy) or a key of the optimiser (`exp_avg`, ...). Keys without elements, such as Adam's step count, are 0-D
tensors named `<parameter>:<key>:`.

>>> piece_name("drafter.head.weight", "exp_avg", 512)  # elements 512 to 512 + its length of the flattened parameter
'drafter.head.weight:exp_avg:512'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.core.errors import UserError

PATTERN = "optimizer-*.safetensors"
MASTER = "weight"


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """Elements [start, start + length) of a flattened parameter, in this process."""

    name: str  # of the parameter
    start: int
    length: int
    owner: Tensor  # the tensor that the optimiser steps; the key of its state
    offset: int  # of the elements in the flattened owner
    written: range  # elements that this process saves, relative to `start`; a part only, where every process has all elements

    @property
    def flat(self) -> Tensor:
        """The owner, flattened."""
        return self.owner.detach().view(-1)


def piece_name(parameter: str, key: str, start: int | None) -> str:
    return f"{parameter}:{key}:{'' if start is None else start}"


def write(shards: Sequence[ParameterShard], state: dict[Tensor, dict[str, Any]], file: Path) -> None:
    """Write this process's pieces. Nothing is gathered from other processes."""
    pieces: dict[str, Tensor] = {}
    for shard in shards:
        for key, value in {MASTER: shard.flat, **state.get(shard.owner, {})}.items():
            if torch.is_tensor(value) and value.numel() == shard.owner.numel() and value.dim():
                start = shard.offset + shard.written.start
                chunk = value.detach().view(-1)[start : start + len(shard.written)].cpu()
                if len(chunk):
                    pieces[piece_name(shard.name, key, shard.start + shard.written.start)] = chunk
            else:
                pieces[piece_name(shard.name, key, None)] = torch.as_tensor(value).detach().cpu().clone()
    save_file(pieces, file)


def read(shards: Sequence[ParameterShard], state: dict[Tensor, dict[str, Any]], directory: Path) -> None:
    """Fill this process's tensors and state from the pieces of all processes of the saving run.

    A parameter that the optimiser had not stepped yet has only a master copy; its other state becomes zeros.
    Raises UserError where elements are missing.
    """
    with ExitStack() as stack, torch.no_grad():
        pieces = _Pieces(directory, stack)
        for shard in shards:
            local_slice = slice(shard.offset, shard.offset + shard.length)
            shard.flat[local_slice] = pieces.elements(shard, MASTER).to(shard.flat)
            for key in pieces.keys(shard.name) - {MASTER}:
                parameter_state = state.setdefault(shard.owner, {})
                if (scalar := pieces.plain(shard.name, key)) is not None:
                    parameter_state[key] = scalar
                else:
                    parameter_state.setdefault(key, torch.zeros_like(shard.owner))
                    parameter_state[key].view(-1)[local_slice] = pieces.elements(shard, key).to(parameter_state[key])


class _Pieces:
    """The pieces of all files, by parameter and key. Tensors are read on demand."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._plain: dict[tuple[str, str], Tensor] = {}
        self._parts: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
        self._keys: dict[str, set[str]] = defaultdict(set)
        for file in sorted(directory.glob(PATTERN)):
            reader = stack.enter_context(safe_open(file, framework="pt"))
            for name in reader.keys():  # noqa: SIM118
                parameter, key, start = name.rsplit(":", 2)
                self._keys[parameter].add(key)
                if start:
                    self._parts[parameter, key][int(start)] = reader.get_slice(name)
                else:
                    self._plain[parameter, key] = reader.get_tensor(name)

    def keys(self, parameter: str) -> set[str]:
        return self._keys[parameter]

    def plain(self, parameter: str, key: str) -> Any | None:
        """The value of a key without elements; None if it has elements.

        An integer is returned as int, for DeepSpeed's CPU optimisers; torch's optimisers keep tensors.
        """
        value = self._plain.get((parameter, key))
        return value if value is None or value.is_floating_point() else int(value)

    def elements(self, shard: ParameterShard, key: str) -> Tensor:
        """[length] the shard's elements, joined from the pieces that have them."""
        chunks, position, end = [torch.empty(0)], shard.start, shard.start + shard.length
        for start, piece in sorted(self._parts[shard.name, key].items()):
            stop = min(start + piece.get_shape()[0], end)
            if start <= position < stop:
                chunks.append(piece[position - start : stop - start])
                position = stop
        if position < end:
            raise UserError(
                f"{self.directory}: its optimiser state lacks elements {position} to {end} of {shard.name} ({key}); "
                "resume from another checkpoint"
            )
        return torch.cat(chunks)
