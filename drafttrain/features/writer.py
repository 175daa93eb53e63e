"""The target's one run over all conversations: each process computes whole shards of its own.

Shapes: B rows, T positions, N positions that are no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from drafttrain.features.form import LOG_REST
from drafttrain.features.layout import Ids
from drafttrain.features.online import Online
from drafttrain.features.store import Store
from drafttrain.model.batch import TrainBatch

Batch = Callable[[Sequence[Ids]], TrainBatch]


@dataclass(frozen=True, slots=True)
class Trial:
    """seconds: that all will take. rest: the mean mass of the target's law outside the kept tokens; None: all is kept."""

    seconds: float
    rest: float | None


class Writer:
    """positions: of one pass of the target, padding included; batch: collates conversations.

    Every process makes as many passes as every other, so that a target whose parts lie in several processes can compute.
    """

    def __init__(self, store: Store, online: Online, batch: Batch, positions: int) -> None:
        self.store, self.online, self.batch, self.positions = store, online, batch, positions

    def trial(self, missing: Sequence[int], size: int) -> Trial:
        """What these shards will take `size` processes, by one pass of middling length, timed after a first one."""
        layout = self.store.layout
        passes = layout.passes(missing[len(missing) // 2], self.positions)
        texts = passes[len(passes) // 2]
        self._columns(texts)
        began = perf_counter()
        columns = self._columns(texts)
        share = sum(map(layout.tokens, missing)) / (size * sum(map(len, texts)))
        rest = float(columns[LOG_REST].exp().mean()) if LOG_REST in columns else None
        return Trial((perf_counter() - began) * share, rest)

    def write(self, missing: Sequence[int], rank: int, size: int, advance: Callable[[int], None]) -> None:
        """This process's share of the missing shards. advance: is told the tokens done.

        Raises UserError on a full disk; shards that are complete stay.
        """
        layout = self.store.layout
        shares = [missing[r::size] for r in range(size)]
        left = max(sum(len(layout.passes(number, self.positions)) for number in share) for share in shares)
        for number in shares[rank]:
            buffers, at = self.store.buffers(number), 0
            for texts in layout.passes(number, self.positions):
                tokens = sum(map(len, texts))
                for name, column in self._columns(texts).items():
                    buffers[name][at : at + tokens] = column
                at, left = at + tokens, left - 1
                advance(tokens)
            self.store.write(number, buffers)
        for _ in range(left):
            self._columns(layout.texts[:1])

    @torch.no_grad()
    def _columns(self, texts: Sequence[Ids]) -> dict[str, Tensor]:
        filled = self.online.fill(self.batch(texts))
        real_BT = filled.document_BT >= 0
        hidden = {key: state_BTH[real_BT] for key, state_BTH in filled.hidden.items()}
        return {name: column.cpu() for name, column in self.store.form.encode(hidden, self.online.target).items()}
