"""Computes the next batch's target states before the drafter trains on the current batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import torch
from torch import Tensor

from drafttrain.model.batch import TrainBatch


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
            yield from (x for x in (item[0] if isinstance(item, tuple) else item for item in values) if isinstance(x, Tensor))
