"""Compares measured runs: their order, the differences, and whether a difference is statistically significant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CompareOptions:
    """How measured runs are ranked. Definitions: docs/metrics.md."""

    sort: str = "speedup"  # speedup | tau | alpha | tokens_per_s | parameters | cost | name
    checkpoints: str = "best"  # checkpoints of each run: best | all
    cost: str = "auto"  # training cost in the plot: flops | hours | tokens; auto: the first one that every run has
    mixed: bool = False  # also rank runs that were measured on different hardware, targets, prompts or settings
    level: float = 0.05  # significance level: a difference with a higher corrected p-value counts as none
    samples: int = 10_000  # number of permutations and of bootstrap samples
    seed: int = 0
    wandb: str | None = None  # save the comparison as a report in this project at W&B, as ENTITY/PROJECT
