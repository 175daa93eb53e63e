"""One scenario: how often drafts are accepted, and what passes cost; its best settings and its break-even points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from drafttrain.core.tree import Path
from drafttrain.measure.simulate.formulas import Ranks, best_tree, expected_tokens, full_tree, speedup, tree_tokens

MOST_BATCH = 4096  # up to which a break-even is looked for


@dataclass(frozen=True, slots=True)
class StepCosts:
    """In plain decode steps at the same batch size. draft: of one pass; other: per step; parallel: one pass gives all drafts.

    token: of each token more in a pass of the target, in plain steps of batch 1. A pass over T tokens takes 1 + token (T - 1),
    the weights being read once: of `nodes` for each of B sequences it is c_v = (1 + token (B nodes - 1)) / (1 + token (B - 1)).
    """

    draft: float
    token: float
    other: float = 0.0
    parallel: bool = False

    def verify(self, nodes: float, batch: int = 1) -> float:
        """c_v: nodes with the root."""
        return (1.0 + self.token * (batch * nodes - 1.0)) / (1.0 + self.token * (batch - 1.0))

    def passes(self, depth: int) -> int:
        return min(1, depth) if self.parallel else depth

    def speedup(self, tokens: float, depth: int, nodes: float, batch: int = 1) -> float:
        """nodes: verified, the root included."""
        return speedup(tokens, self.passes(depth) * self.draft, self.verify(nodes, batch), self.other)


@dataclass(frozen=True, slots=True)
class Shape:
    """A proposal: what it costs and what it gives. nodes: the root not counted."""

    name: str
    depth: int
    nodes: int
    tokens: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """alpha_K: by draft position, the last one for all positions behind; ranks: for trees. lengths: the chains that count."""

    alpha_K: tuple[float, ...]
    ranks: Ranks
    costs: StepCosts
    lengths: Sequence[int] = field(default_factory=lambda: range(1, 11))

    def chain(self, K: int, batch: int = 1) -> Shape:
        known = self.alpha_K[:K]
        tokens = expected_tokens([*known, *[self.alpha_K[-1]] * (K - len(known))])
        return Shape("chain", K, K, tokens, self.costs.speedup(tokens, K, K + 1, batch))

    def tree(self, name: str, paths: Sequence[Path], batch: int = 1) -> Shape:
        depth, tokens = max(map(len, paths), default=0), tree_tokens(self.ranks, paths)
        return Shape(name, depth, len(paths), tokens, self.costs.speedup(tokens, depth, len(paths) + 1, batch))

    def best_chain(self, batch: int = 1) -> Shape:
        return max((self.chain(K, batch) for K in self.lengths), key=lambda shape: shape.speedup)

    def best_full_tree(self, width: int, nodes: int, batch: int = 1) -> Shape | None:
        """The best depth of trees of `width` children; None where even one level is too large."""
        depths = [d for d in range(1, len(self.ranks) + 1) if sum(width**k for k in range(1, d + 1)) <= nodes]
        shapes = [self.tree(f"{width}-ary tree", full_tree(width, d), batch) for d in depths]
        return max(shapes, key=lambda shape: shape.speedup, default=None)

    def static_trees(self, nodes: int, batch: int = 1) -> list[Shape]:
        """The best tree of each size."""
        sizes = range(1, len(best_tree(self.ranks, nodes)) + 1)
        return [self.tree("static tree", best_tree(self.ranks, n), batch) for n in sizes]

    def at(self, alpha: float) -> Scenario:
        """The same acceptance at every position."""
        return replace(self, alpha_K=(alpha,))

    def break_even_draft_cost(self) -> float | None:
        """c_d above which no length of chain gains anything at batch 1; None where free drafts would not either."""
        free = replace(self, costs=replace(self.costs, draft=0.0))
        spare = [
            (shape.tokens - self.costs.verify(K + 1) - self.costs.other) / self.costs.passes(K)
            for K, shape in ((K, free.chain(K)) for K in self.lengths)
        ]
        return max(spare) if max(spare) > 0 else None

    def break_even_alpha(self) -> float | None:
        """The acceptance, the same at every position, below which nothing is gained at batch 1; None where 1 is too little."""
        if self.at(1.0).best_chain().speedup < 1.0:
            return None
        return _bisect(lambda alpha: self.at(alpha).best_chain().speedup >= 1.0, 0.0, 1.0)

    def break_even_batch(self) -> int | None:
        """The least batch size at which no length of chain gains anything; None where there is none up to 4096."""
        if self.best_chain(MOST_BATCH).speedup >= 1.0:
            return None
        low, high = 0, MOST_BATCH  # a larger batch never makes verifying cheaper beside a plain step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.best_chain(middle).speedup >= 1.0 else (low, middle)
        return high


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition begins to hold, to 1e-6."""
    if holds(low):
        return low
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
