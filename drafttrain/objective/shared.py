"""Predictions of a shared head (`model.batch.Shared`): which rows of its input are scored together.

Each kind of its logits is scored as one step, whose predictions are in the order of rows, then columns. A piece has whole rows,
because the head makes all their logits at once.

Shapes: M predictions of a step, E predictions of a kind, J columns, C predictions of a piece, N rows of it, U positions of a
chunk.

Worked example: two columns and the rows 0, 1 and 2, where row 2 has no prediction in column 1. A kind's predictions are

    number    0  1  2  3  4
    row       0  0  1  1  2
    column    0  1  0  1  0

With two kinds, and at most eight predictions at once, a piece has two rows. The first has the predictions 0 to 3 of both kinds,
the second prediction 4: entry 0 of the two that the head gives for row 2.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from drafttrain.model.batch import Prediction, TrainBatch, moved
from drafttrain.objective.chunks import CPU, NONE, HeadRows, Index, LossChunk, PredictionPart


def shared_steps(predictions: Sequence[Prediction], batch: TrainBatch) -> dict[Hashable, SharedSteps]:
    """The steps of each shared head, by the head."""
    by_head: dict[Hashable, list[Prediction]] = {}
    for prediction in predictions:
        if prediction.shared is not None:
            by_head.setdefault(prediction.shared.head, []).append(prediction)
    return {head: SharedSteps(steps, batch) for head, steps in by_head.items()}


class SharedSteps:
    """The steps of one shared head, and `kinds`, which are scored in their place: the predictions of each kind as one step."""

    def __init__(self, predictions: Sequence[Prediction], batch: TrainBatch) -> None:
        by_kind: dict[int, dict[int, Prediction]] = {}
        for prediction in predictions:
            assert prediction.shared is not None
            by_kind.setdefault(prediction.shared.kind, {})[prediction.shared.column] = prediction
        self.columns = len(by_kind[0])
        kinds = [[by_kind[kind][column] for column in range(self.columns)] for kind in range(len(by_kind))]
        first, rows = kinds[0], [batch.on_host(p.shared.row_M) for p in kinds[0] if p.shared is not None]
        row_E, counts = torch.cat(rows), [len(row_M) for row_M in rows]
        column_E = torch.arange(self.columns).repeat_interleave(torch.tensor(counts))
        order_E = (row_E * self.columns + column_E).argsort()
        self.row_E, self.column_E = row_E[order_E], column_E[order_E]
        self.position_E = torch.cat([batch.teacher_index(batch.on_host(p.label_M)) for p in first])[order_E]
        device = first[0].label_M.device
        self.kinds = [_joined(steps, moved(order_E, device)) for steps in kinds]
        self._numbers = moved(order_E.argsort(), device).split(counts)

    def number_M(self, column: int) -> Tensor:
        """Numbers of a step's predictions among those of its kind."""
        return self._numbers[column]

    def chunks(self, first: int, at_once: int, device: torch.device = CPU) -> Iterator[LossChunk]:
        """As `objective.chunks`: where a row has more than `at_once` predictions, a piece has one row.

        first: the number of the first kind's step.
        """
        steps = range(first, first + len(self.kinds))
        if not len(self.row_E):
            yield LossChunk(
                moved(self.position_E, device), [[PredictionPart(step, NONE, NONE, 0, HeadRows(NONE)) for step in steps]]
            )
            return
        rows, counts = self.row_E.unique_consecutive(return_counts=True)
        rows_per_piece = max(1, at_once // (self.columns * len(self.kinds)))
        begins = [0, *counts.cumsum(0)[rows_per_piece - 1 :: rows_per_piece].tolist()]
        begins += [len(self.row_E)] if begins[-1] < len(self.row_E) else []
        row_pieces = [(a, b, rows[i * rows_per_piece : (i + 1) * rows_per_piece]) for i, (a, b) in enumerate(pairwise(begins))]
        all_U, index_E = self.position_E.unique(return_inverse=True)
        for group in _groups(row_pieces, index_E, at_once):
            a, b = group[0][0], group[-1][1]
            needed_U, place_C = index_E[a:b].unique(return_inverse=True)
            place_C, pieces = moved(place_C, device), []
            for begin, end, row_N in group:
                head_rows = HeadRows(_index(row_N, device), self._entries(begin, end, row_N, device))
                part_args = slice(begin, end), place_C[begin - a : end - a], end - begin, head_rows
                pieces.append([PredictionPart(step, *part_args) for step in steps])
            yield LossChunk(moved(all_U[needed_U], device), pieces)

    def _entries(self, begin: int, end: int, row_N: Tensor, device: torch.device) -> Tensor | None:
        """Which of the rows' logits are the predictions from `begin` to `end`; None: all."""
        if end - begin == len(row_N) * self.columns:
            return None
        number_C = torch.searchsorted(row_N, self.row_E[begin:end])
        return moved(number_C * self.columns + self.column_E[begin:end], device)


Piece = tuple[int, int, Tensor]  # its predictions' begin and end, and its rows


def _groups(pieces: Sequence[Piece], index_E: Tensor, at_once: int) -> Iterator[list[Piece]]:
    """Consecutive pieces whose positions lie within `at_once`, so that they share the target's logits; at least one."""
    group, low, high = list[Piece](), 0, 0
    for piece in pieces:
        piece_low, piece_high = (int(x) for x in index_E[piece[0] : piece[1]].aminmax())
        if group and max(high, piece_high) - min(low, piece_low) >= at_once:
            yield group
            group = []
        low, high = (min(low, piece_low), max(high, piece_high)) if group else (piece_low, piece_high)
        group.append(piece)
    yield group


def _index(row_N: Tensor, device: torch.device) -> Index:
    first, last = int(row_N[0]), int(row_N[-1])
    return slice(first, last + 1) if last - first + 1 == len(row_N) else moved(row_N, device)


def _joined(steps: Sequence[Prediction], order_E: Tensor) -> Prediction:
    """The predictions of all steps as those of one, in another order."""
    weights = [torch.zeros_like(p.label_M, dtype=torch.float32) + p.weight for p in steps]
    fields = ([p.source_M for p in steps], [p.label_M for p in steps], weights)
    source_E, label_E, weight_E = (torch.cat(field_tensors)[order_E] for field_tensors in fields)
    return replace(steps[0], source_M=source_E, label_M=label_E, weight=weight_E)
