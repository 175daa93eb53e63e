"""A bounded buffer of sequences that a loop has fed, each with the version of the target that made its states.

Shapes: T positions of a sequence, B rows, N columns, H hidden.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.features.padded import batch_of
from drafttrain.model.batch import TrainBatch


@dataclass(frozen=True, slots=True)
class ReplayedSequence:
    """One sequence."""

    token_T: Tensor
    mask_T: Tensor
    hidden: dict[int, Tensor]  # [T, H] by tap; empty: the target computes them when they are needed
    version: int  # of the target


class Replay:
    """Holds at most `capacity` sequences: a new one takes the place of the oldest."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.samples: deque[ReplayedSequence] = deque(maxlen=capacity)
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, batch: TrainBatch, version: int) -> None:
        """Add every row of a right-padded batch."""
        for b, length in enumerate((batch.document_BT >= 0).sum(1).tolist()):
            hidden = {key: h[b, :length].clone() for key, h in batch.hidden.items()}
            if length > 1:
                self.samples.append(ReplayedSequence(batch.token_BT[b, :length], batch.mask_BT[b, :length], hidden, version))

    def drop_before(self, version: int) -> int:
        """Drop the samples of earlier versions; how many they were."""
        recent = [sample for sample in self.samples if sample.version >= version]
        dropped = len(self.samples) - len(recent)
        if dropped:
            self.samples = deque(recent, self.samples.maxlen)
        return dropped

    def draw(self, rows: int) -> TrainBatch | None:
        """A batch of at most so many different samples, all with states or all without; None: there is no sample."""
        if not self.samples:
            return None
        order = torch.randperm(len(self.samples), generator=self._generator).tolist()
        first = self.samples[order[0]]
        samples = [self.samples[i] for i in order if self.samples[i].hidden.keys() == first.hidden.keys()][:rows]
        token_BN = pad_sequence([sample.token_T for sample in samples], batch_first=True)
        mask_BN = pad_sequence([sample.mask_T for sample in samples], batch_first=True)
        real_BN = pad_sequence([torch.ones_like(sample.token_T) for sample in samples], batch_first=True)
        hidden = {key: pad_sequence([sample.hidden[key] for sample in samples], batch_first=True) for key in first.hidden}
        return batch_of(token_BN, real_BN, mask_BN, hidden)
