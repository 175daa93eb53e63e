"""Measured runs side by side: who is ahead, by how much, and whether the difference is more than chance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CompareOptions:
    """How measured runs are ranked. Definitions: docs/metrics.md."""

    sort: str = "speedup"  # speedup | tau | alpha | tokens_per_s | parameters | cost | name
    checkpoints: str = "best"  # of each run: best | all
    cost: str = "auto"  # of training, in the plot: flops | hours | tokens; auto: the first of them that every run has
    mixed: bool = False  # rank runs that were measured on different hardware, targets, prompts or settings too
    level: float = 0.05  # a difference whose corrected p-value is above it counts as none
    samples: int = 10_000  # of permutations and of the bootstrap
    seed: int = 0
    wandb: str | None = None  # save the comparison as a report in this project at W&B, as ENTITY/PROJECT
