"""Computes target states in every step, batch by batch.

`Prefetch` computes those of the next batch before the drafter trains on the current batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import Taps, Target


class Online:
    """Runs the frozen target over a batch. adapters: the target with each of its LoRA adapters, for the rows that name one."""

    def __init__(self, target: Target, taps: Taps, adapters: Mapping[str, Target] | None = None) -> None:
        self.target, self.taps, self.adapters = target, taps, adapters or {}

    @torch.no_grad()
    def fill(self, batch: TrainBatch) -> TrainBatch:
        """The batch on the target's device with the tapped states and the post-norm state.

        The objective needs the post-norm state in addition to the drafter's taps: the head turns it into the target's
        distribution.
        """
        batch = batch.to(self.target.device)
        rows = {name: [i for i, each in enumerate(batch.adapters) if each == name] for name in dict.fromkeys(batch.adapters)}
        if len(rows) < 2:
            (adapter,) = rows or (None,)
            return replace(batch, hidden=self._states(batch, self.target if adapter is None else self.adapters[adapter]))
        parts = [self.fill(batch.only(indices)).hidden for indices in rows.values()]
        order_B = torch.tensor([i for indices in rows.values() for i in indices]).argsort().to(batch.token_BT.device)
        return replace(batch, hidden={key: torch.cat([part[key] for part in parts])[order_B] for key in parts[0]})

    def _states(self, batch: TrainBatch, target: Target) -> dict[int, Tensor]:
        no_rows_B0 = batch.token_BT[:, :0]
        return target(batch.token_BT, None, batch.sees(), batch.position_BT, self.taps | Taps(final=True), no_rows_B0).hidden


class Prefetch:
    """`fill`, one batch ahead: on a GPU in a separate stream, concurrently with the drafter; elsewhere in program order.

    The states are the same as without it. One more batch of states is in memory.
    """

    def __init__(self, fill: Callable[[TrainBatch], TrainBatch], device: torch.device) -> None:
        self._fill = fill
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._begun: tuple[TrainBatch, TrainBatch] | None = None

    def start(self, batch: TrainBatch) -> None:
        """Start to compute the batch that `fill` will be called with next."""
        if self._stream is None:
            self._begun = batch, self._fill(batch)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # the batch's tokens are still being copied
        with torch.cuda.stream(self._stream):
            self._begun = batch, self._fill(batch)

    def fill(self, batch: TrainBatch) -> TrainBatch:
        """The batch with its states: those started for this batch object, or newly computed ones."""
        started, self._begun = self._begun, None
        if started is None or started[0] is not batch:
            return self._fill(batch)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for tensor in tensors(started[1]):
                tensor.record_stream(current)  # its memory is reused only after this stream has used it
        return started[1]


def tensors(batch: TrainBatch) -> Iterator[Tensor]:
    """All tensors of a batch on its device, its states and what it placed there included."""
    for holder in (batch, batch.top, batch.whole):
        for name in () if holder is None else (field.name for field in fields(holder)):
            value = getattr(holder, name)
            values = value.values() if isinstance(value, dict) else [value]
            firsts = (item[:1] if isinstance(item, tuple) else (item,) for item in values)
            yield from (x for first in firsts for x in first if isinstance(x, Tensor))
