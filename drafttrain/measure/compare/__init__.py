"""Compares measured runs: their order, the differences, and whether a difference is statistically significant."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.core.limits import above, at_least, choice


@dataclass
class CompareOptions:
    """How measured runs are ranked. Definitions: docs/metrics.md."""

    # speedup | tau | alpha | tokens_per_s | parameters | cost | name
    sort: str = choice("speedup", "tau", "alpha", "tokens_per_s", "parameters", "cost", "name")
    checkpoints: str = choice("best", "all")  # checkpoints of each run: best | all
    # training cost in the plot: flops | hours | tokens; auto: the first one that every run has
    cost: str = choice("auto", "flops", "hours", "tokens")
    mixed: bool = False  # also rank runs that were measured on different hardware, targets, prompts or settings
    level: float = above(0.05, 0, below=1)  # significance level: a difference with a higher corrected p-value counts as none
    samples: int = at_least(10_000, 100)  # number of permutations and of bootstrap samples
    seed: int = 0
    wandb: str | None = None  # save the comparison as a report in this project at W&B, as ENTITY/PROJECT
