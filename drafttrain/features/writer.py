"""Computes the features: the target runs once over all conversations, and each process computes whole shards.

Shapes: B rows, T positions, N positions without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from drafttrain.features.format import LOG_REST
from drafttrain.features.layout import Ids
from drafttrain.features.online import Online
from drafttrain.features.store import FeatureStore
from drafttrain.model.batch import TrainBatch

Batch = Callable[[Sequence[Ids]], TrainBatch]


@dataclass(frozen=True, slots=True)
class TimedTrial:
    """Extrapolation from one timed forward."""

    seconds: float  # expected time for all missing shards
    dropped_mass: float | None  # mean probability outside the stored top-k tokens; None: the final state is stored


class ShardWriter:
    """Computes and writes shards.

    positions: tokens of one forward, padding included. batch: collates conversations. All processes run the same number of
    forwards, so that a target that is split over processes can compute.
    """

    def __init__(self, store: FeatureStore, online: Online, batch: Batch, positions: int) -> None:
        self.store, self.online, self.batch, self.positions = store, online, batch, positions

    def trial(self, missing: Sequence[int], size: int) -> TimedTrial:
        """Extrapolate the time of these shards on `size` processes, from one forward of medium length after a warm-up."""
        layout = self.store.layout
        passes = layout.passes(missing[len(missing) // 2], self.positions)
        sequences = passes[len(passes) // 2]
        self._columns(sequences)
        start_time = perf_counter()
        columns = self._columns(sequences)
        scale = sum(map(layout.tokens, missing)) / (size * sum(map(len, sequences)))
        dropped_mass = float(columns[LOG_REST].exp().mean()) if LOG_REST in columns else None
        return TimedTrial((perf_counter() - start_time) * scale, dropped_mass)

    def write(self, missing: Sequence[int], rank: int, size: int, advance: Callable[[int], None]) -> None:
        """Write this process's share of the missing shards. advance: called with the tokens that are done.

        Raises UserError on a full disk; complete shards are kept.
        """
        layout = self.store.layout
        shards = [missing[process::size] for process in range(size)]
        remaining_passes = max(
            sum(len(layout.passes(shard, self.positions)) for shard in process_shards) for process_shards in shards
        )
        for shard in shards[rank]:
            buffers, offset = self.store.buffers(shard), 0
            for sequences in layout.passes(shard, self.positions):
                tokens = sum(map(len, sequences))
                for name, column in self._columns(sequences).items():
                    buffers[name][offset : offset + tokens] = column
                offset, remaining_passes = offset + tokens, remaining_passes - 1
                advance(tokens)
            self.store.write(shard, buffers)
        for _ in range(remaining_passes):
            self._columns(layout.sequences[:1])

    @torch.no_grad()
    def _columns(self, sequences: Sequence[Ids]) -> dict[str, Tensor]:
        """The stored columns of some conversations, on the CPU."""
        filled = self.online.fill(self.batch(sequences))
        real_BT = filled.document_BT >= 0
        hidden = {key: state_BTH[real_BT] for key, state_BTH in filled.hidden.items()}
        return {name: column.cpu() for name, column in self.store.form.encode(hidden, self.online.target).items()}
