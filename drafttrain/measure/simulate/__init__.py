"""Simulates speedup from acceptance, costs and batch size by formula, before training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SimulateOptions:
    """Assumptions. null: the report's figure, if a report is given. Costs are in plain decode steps (docs/measuring.md)."""

    alpha: str | None = None  # 0.8: acceptance at every draft position; +0.05 or -0.05: a change of the report's acceptance
    draft_cost: float | None = None  # c_d, cost of one draft pass; without a report 0.05
    token_cost: float | None = None  # cost of each further token in the target's pass; without a report 0.01
    other_cost: float | None = None  # other cost per decode step: acceptance, cache, host; without a report 0
    experts: int = 0  # of a layer of a mixture-of-experts target; 0: the target is dense, or its token_cost was measured
    experts_per_token: int = 0  # experts that a token is sent to
    expert_share: float = 0.0  # routed experts' weights / all weights that a plain step of one token reads
    parallel: bool = False  # one draft pass gives all drafts, whatever their number
    ranks: Any = None  # for trees, [depth][rank]: how often the drafter's choice of this rank is true; [[0.6, 0.2], [0.5, 0.2]]
    alphas: list[float] = field(default_factory=lambda: [0.5, 0.6, 0.7, 0.8, 0.9])  # further acceptance rates to show
    lengths: list[int] = field(default_factory=lambda: list(range(1, 11)))  # K, drafts of a chain
    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256])
    width: int = 2  # children of every node of the W-ary trees
    nodes: int = 32  # of the largest tree, root excluded
    trials: int = 20_000  # trials of the accept/reject simulation
    seed: int = 0
