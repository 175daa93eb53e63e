"""Which predictions are scored together: a chunk of the target's positions at a time, and predictions of one head at once.

The target's logits at a position serve every prediction of the token after it, of whichever step.

Shapes: M predictions of a step, C predictions scored at once, N positions, U positions of a chunk.

Worked example: two steps with the positions `2 3 4 5` and `3 4 5`, two at once.

    chunk   positions   step 0's predictions   step 1's predictions
    0       2 3         0 1                    0
    1       4 5         2 3                    1 2
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.core.sequence_shard import most_of_all
from drafttrain.model.batch import moved

CPU = torch.device("cpu")
Index = slice | Tensor  # a slice where the entries are consecutive, so that nothing is copied
NONE = slice(0, 0)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Some rows of a shared head's input."""

    row_N: Index
    entry_C: Tensor | None = None  # of their flattened logits [n * J, V], those that are predictions; None: all are


@dataclass(frozen=True, slots=True)
class PredictionPart:
    """Some predictions of one step."""

    step: int  # its number among the batch's predictions
    row_C: Index  # which of its predictions
    place_C: Index  # of each one's position, within the chunk's positions
    count: int
    rows: HeadRows | None = None  # of a shared head, whose piece has a part for each kind of logits


@dataclass(frozen=True, slots=True)
class LossChunk:
    """Some positions of the target and the predictions of the tokens after them."""

    position_U: Tensor  # flat, ascending
    pieces: list[list[PredictionPart]]  # predictions that one call of their head scores


def chunks(
    position_M: Sequence[Tensor], heads: Sequence[Hashable], at_once: int, device: torch.device = CPU
) -> Iterator[LossChunk]:
    """Chunks of at most `at_once` positions, whose pieces have at most `at_once` predictions.

    position_M: of each step's predictions, on the host. heads: of each step; steps of equal ones share pieces. A step without
    predictions has an empty part in the first chunk, so that its head is called in any case. device: of the chunks.
    """
    if not position_M:
        return
    host_positions = list(position_M)
    all_N = torch.cat(host_positions).unique()
    orders = [None if bool((x.diff() >= 0).all()) else x.argsort(stable=True) for x in host_positions]
    indices = [
        torch.searchsorted(all_N, x if order is None else x[order]) for x, order in zip(host_positions, orders, strict=True)
    ]
    for start in range(0, max(len(all_N), 1), at_once):
        by_head: dict[Hashable, list[list[PredictionPart]]] = {}
        for step, (head, order, index) in enumerate(zip(heads, orders, indices, strict=True)):
            a, b = torch.searchsorted(index, torch.tensor([start, start + at_once])).tolist()
            for segment in _parts(step, order, index[a:b] - start, a, at_once, device):
                _append(by_head.setdefault(head, []), segment, at_once)
            if not len(index) and start == 0:
                by_head.setdefault(head, []).append([PredictionPart(step, NONE, NONE, 0)])
        yield LossChunk(
            moved(all_N[start : start + at_once], device), [piece for pieces in by_head.values() for piece in pieces]
        )


def alike(
    found: Sequence[LossChunk], heads: Sequence[Hashable], device: torch.device, shared: Container[Hashable] = ()
) -> list[LossChunk]:
    """The chunks with empty pieces between them, so that all processes call every head in one order and equally often.

    heads: of each step, in the same order in all processes. shared: the shared ones. See `core/sequence_shard.py`.
    """
    order = list(dict.fromkeys(heads))
    local_pieces = [[[p for p in chunk.pieces if heads[p[0].step] == head] for head in order] for chunk in found]
    empty = [_nothing([step for step, step_head in enumerate(heads) if step_head == head], head in shared) for head in order]
    count = int(most_of_all(torch.tensor([len(found)], device=device)))
    calls_NH = torch.zeros(count, len(order), dtype=torch.long, device=device)
    for chunk_number, by_head in enumerate(local_pieces):
        calls_NH[chunk_number] = torch.tensor([len(pieces) for pieces in by_head], device=device)
    position_0, aligned_chunks = torch.zeros(0, dtype=torch.long, device=device), list[LossChunk]()
    for chunk_number, calls in enumerate(most_of_all(calls_NH).tolist()):
        by_head = local_pieces[chunk_number] if chunk_number < len(found) else [[] for _ in order]
        filled = [
            pieces + [empty_piece] * (n - len(pieces)) for pieces, empty_piece, n in zip(by_head, empty, calls, strict=True)
        ]
        position_U = found[chunk_number].position_U if chunk_number < len(found) else position_0
        aligned_chunks.append(LossChunk(position_U, [piece for pieces in filled for piece in pieces]))
    return aligned_chunks


def _nothing(steps: Sequence[int], shared: bool) -> list[PredictionPart]:
    """A piece without predictions, of the steps of one head."""
    if shared:
        return [PredictionPart(step, NONE, NONE, 0, HeadRows(NONE)) for step in steps]
    return [PredictionPart(steps[0], NONE, NONE, 0)]


def _parts(
    step: int, order_M: Tensor | None, place_R: Tensor, first: int, at_once: int, device: torch.device
) -> Iterator[PredictionPart]:
    """The predictions of one step in a chunk, of which the step's first one is number `first` in the order of positions."""
    for start in range(0, len(place_R), at_once):
        place_C = place_R[start : start + at_once]
        count, a = len(place_C), first + start
        row_C = slice(a, a + count) if order_M is None else moved(order_M[a : a + count], device)
        run = slice(int(place_C[0]), int(place_C[0]) + count)
        yield PredictionPart(step, row_C, run if bool((place_C.diff() == 1).all()) else moved(place_C, device), count)


def _append(pieces: list[list[PredictionPart]], segment: PredictionPart, at_once: int) -> None:
    """Add the part to the last piece where it fits."""
    if pieces and sum(member.count for member in pieces[-1]) + segment.count <= at_once:
        pieces[-1].append(segment)
    else:
        pieces.append([segment])


def joined_index(indices: Sequence[Index], device: torch.device) -> Index:
    """One index after the other."""
    return indices[0] if len(indices) == 1 else torch.cat([index_tensor(index, device) for index in indices])


def index_tensor(index: Index, device: torch.device) -> Tensor:
    """The index as numbers."""
    return torch.arange(index.start, index.stop, device=device) if isinstance(index, slice) else index


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts; of a single part without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
