"""This process's part of a target that several processes share, and what they say to each other.

All of them run the same program on the same input in lock step, and decide alone what they accept and when they stop. They
decide alike because all see the same bits:
- each slice of the vocabulary's logits is computed by one process and copied to the others;
- an all-reduce of gloo or NCCL adds each element up in one place (the owner of its chunk in a ring, the root of a tree, the
  switch) and copies the sum: the residual stream and the tapped states are the same everywhere;
- what lies between is the same program on the same kind of device. A group of unlike GPUs does not fulfil that.
What the clock decides is decided by the first process and shared.

Shapes: B rows, N positions, H hidden, V vocabulary, W columns of one process.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from drafttrain.targets.devices import bind

Value = TypeVar("Value")

PATIENCE = timedelta(minutes=30)  # for the slowest process: the first one alone runs the whole model's forward at load time


@dataclass(frozen=True, slots=True)
class Part:
    """Rank and size of this process among those that share a target; group None is the default group.

    `sum` and `joined` ask the device nothing and allocate as any operation does, so that a CUDA graph can hold them.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        """This process speaks to the user, writes, and reads the clock."""
        return self.rank == 0

    def sum(self, x_BNH: Tensor) -> Tensor:
        """The sum over all processes, in place where it can be."""
        if self.size > 1:
            x_BNH = x_BNH.contiguous()
            distributed.all_reduce(x_BNH, group=self.group)
        return x_BNH

    def joined(self, x_BNW: Tensor, width: int) -> Tensor:
        """[..., width]: every process's columns side by side, without what fills up the last ones."""
        if self.size == 1:
            return x_BNW
        x_BNW = x_BNW.contiguous()
        pieces = [torch.empty_like(x_BNW) for _ in range(self.size)]
        distributed.all_gather(pieces, x_BNW, group=self.group)
        filled = x_BNW.shape[-1] * self.size - width
        return torch.cat(pieces, -1)[..., :width].contiguous() if filled else torch.cat(pieces, -1)

    def share(self, value: Value) -> Value:
        """The first process's value, on every process. Plain values only, and never inside a step."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def check(self, value: object) -> None:
        """Raise RuntimeError where a process has found something else than the first one: then nothing they found counts."""
        if self.share(value) != value:
            raise RuntimeError(f"process {self.rank} of {self.size} decoded other tokens than the first; are their GPUs alike?")


WHOLE = Part()


def join(size: int, device: torch.device) -> Part:
    """Form the group of the processes that torchrun's environment variables name; `size` of them, as the caller has checked."""
    bind(device)
    if size == 1:
        return WHOLE
    if not distributed.is_initialized():
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        distributed.init_process_group(backend, timeout=PATIENCE, device_id=bound)
        end_at_exit()
    return Part(int(os.environ["RANK"]), size)


def end_at_exit() -> None:
    """End the process group when this process ends without having done so, because of an error or a mistake: gloo's threads
    would abort it then, with a code that is not the one it ends with.
    """

    def end() -> None:
        if distributed.is_initialized() and distributed.get_backend() == "gloo":
            distributed.destroy_process_group()

    atexit.register(end)


def leave(part: Part) -> None:
    """End the group; no process goes before the last one has arrived."""
    if part.size > 1:
        distributed.barrier(group=part.group)
        distributed.destroy_process_group(part.group)
