"""Simulates speedup from acceptance, costs and batch size by formula, before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drafttrain.core.limits import at_least, within


@dataclass
class SimulateOptions:
    """Assumptions. null: the report's figure, if a report is given. Costs are in plain decode steps (docs/measuring.md)."""

    alpha: str | None = None  # 0.8: acceptance at every draft position; +0.05 or -0.05: a change of the report's acceptance
    draft_cost: float | None = at_least(None, 0)  # c_d, cost of one draft pass; without a report 0.05
    token_cost: float | None = at_least(None, 0)  # cost of each further token in the target's pass; without a report 0.01
    other_cost: float | None = at_least(None, 0)  # other cost per decode step: acceptance, cache, host; without a report 0
    # of a layer of a mixture-of-experts target; 0: the target is dense, or its token_cost was measured
    experts: int = at_least(0, 0)
    experts_per_token: int = 0  # experts that a token is sent to
    expert_share: float = 0.0  # routed experts' weights / all weights that a plain step of one token reads
    parallel: bool = False  # one draft pass gives all drafts, whatever their number
    ranks: Any = None  # for trees, [depth][rank]: how often the drafter's choice of this rank is true; [[0.6, 0.2], [0.5, 0.2]]
    alphas: list[float] = within([0.5, 0.6, 0.7, 0.8, 0.9], 0, 1)  # further acceptance rates to show
    lengths: list[int] = at_least(list(range(1, 11)), 1)  # K, drafts of a chain
    batch_sizes: list[int] = at_least([1, 2, 4, 8, 16, 32, 64, 128, 256], 1)
    width: int = at_least(2, 1)  # children of every node of the W-ary trees
    nodes: int = at_least(32, 1)  # of the largest tree, root excluded
    trials: int = at_least(20_000, 100)  # trials of the accept/reject simulation
    seed: int = 0
