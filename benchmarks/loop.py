"""One family's optimisation steps over given batches, as in the trainer but without its engine."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from benchmarks.common import Run, wait
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import collate
from drafttrain.drafters import families
from drafttrain.features.online import Online, Prefetch
from drafttrain.model.batch import TrainBatch
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.load import LoadedTarget

Rows = Sequence[Encoded]


class Training:
    def __init__(self, family: str, loaded: LoadedTarget) -> None:
        torch.manual_seed(0)
        made, target = families()[family], loaded.target
        self.device = target.device
        self.drafter = made.build(made.options(), target).to(self.device).train()
        self.online = Online(target, self.drafter.taps)
        self.objective = Objective(self.drafter, target, LossOptions())
        trained = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 1e-5)
        self.pad = loaded.tokenizer.pad_token_id or 0

    def batch(self, rows: Rows) -> TrainBatch:
        return collate(rows, self.pad)

    def loss(self, batches: Sequence[Rows]) -> float:
        with torch.no_grad():
            return sum(float(self.objective(self.online.fill(self.batch(rows)))[0]) for rows in batches)

    def losses(self, batches: Sequence[Rows], ahead: bool) -> list[float]:
        """The loss of a step for each batch. ahead: the target's states for the next batch are started before the drafter's
        step.
        """
        prefetch, found = Prefetch(self.online.fill, self.device), []
        work = [self.batch(rows).to(self.device) for rows in batches]
        for number, batch in enumerate(work):
            filled = prefetch.fill(batch)
            if ahead and number + 1 < len(work):
                prefetch.start(work[number + 1])
            loss = self.objective(filled)[0]
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found).tolist()

    def rate(self, batches: Sequence[Rows], ahead: bool = False) -> Run:
        """Tokens per second over a step for each batch, without padding."""
        tokens = sum(len(row.token_ids) for rows in batches for row in rows)

        def run() -> float:
            wait(self.device)
            began = perf_counter()
            self.losses(batches, ahead)
            return tokens / (perf_counter() - began)

        return run
