"""Target states read from disk, batch by batch: the target's blocks do not run.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from drafttrain.batch import TrainBatch
from drafttrain.features.layout import key_of
from drafttrain.features.store import Store


class Cached:
    """Fills batches of the conversations that `store` holds whole. device, dtype: the target's."""

    def __init__(self, store: Store, device: torch.device, dtype: torch.dtype) -> None:
        self.store, self.device, self.dtype = store, device, dtype

    def fill(self, batch: TrainBatch) -> TrainBatch:
        """The batch on the target's device with what `Online.fill` would compute; padding holds zeros.

        States travel as they are stored, and get the target's dtype there.
        """
        form, (B, T), first = self.store.form, batch.token_BT.shape, batch.span.first if batch.span else 0
        columns = {name: torch.zeros(B, T, *c.shape, dtype=c.dtype) for name, c in form.columns.items()}
        for document in documents((batch.whole or batch).to(torch.device("cpu"))):
            start, stop = max(document.start, first), min(document.stop, first + T)
            if start < stop:
                place = self.store.layout.places[document.key]
                place = replace(place, start=place.start + start - document.start, stop=place.start + stop - document.start)
                for name, part in self.store.read(place).items():
                    columns[name][document.row, start - first : stop - first] = part
        columns = {name: column.to(self.device) for name, column in columns.items()}
        return replace(batch.to(self.device), hidden=form.states(columns, self.dtype), top=form.law(columns))


@dataclass(frozen=True, slots=True)
class Document:
    """Columns `start` to `stop` of a batch's row."""

    row: int
    start: int
    stop: int
    key: str


def documents(batch: TrainBatch) -> Iterator[Document]:
    """All of a batch, row by row."""
    for row, (token_T, document_T) in enumerate(zip(batch.token_BT, batch.document_BT, strict=True)):
        numbers, counts = document_T.unique_consecutive(return_counts=True)
        start = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                yield Document(row, start, start + count, key_of(token_T[start : start + count].numpy()))
            start += count
