"""A scenario: acceptance and costs. It gives the best settings and the break-even points; toy drafts check its formulas.

Shapes: B trials, N nodes (root included), V vocabulary, K depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, Path, TreeShape
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.measure.simulate.formulas import (
    Ranks,
    best_tree,
    distinct_experts,
    expected_tokens,
    full_tree,
    speedup,
    tree_tokens,
)

MOST_BATCH = 4096  # largest batch size of the search for a break-even


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts layers of a target."""

    count: int  # experts of a layer, E
    chosen: int  # that a token is sent to, k
    share: float  # of what a plain step of one token reads, in routed experts' weights

    def pass_cost(self, tokens: float) -> float:
        """What a pass over these tokens reads, in plain steps of one token: dense weights once, distinct experts each once."""
        return 1.0 - self.share + self.share * distinct_experts(tokens, self.count, self.chosen) / self.chosen


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs in plain decode steps at the same batch size.

    A target pass over T tokens costs R(T) + token (T - 1) plain steps of batch 1. R(T) is what it reads: 1, the weights once,
    or with experts `Experts.pass_cost(T)`. A verification of `nodes` for each of B sequences costs c_v, the pass over
    B nodes tokens in passes over B tokens.
    """

    draft: float  # one draft pass
    token: float  # each further token in a target pass, in plain steps of batch 1
    other: float = 0.0  # the rest of a decode step
    parallel: bool = False  # one draft pass gives all drafts
    experts: Experts | None = None  # of a target whose layers are mixtures; None: it reads the same weights for any tokens

    def verify(self, nodes: float, batch: int = 1) -> float:
        """c_v, the cost of a verification. nodes: root included."""
        return self._pass(batch * nodes) / self._pass(batch)

    def _pass(self, tokens: float) -> float:
        weights_read = 1.0 if self.experts is None else self.experts.pass_cost(tokens)
        return weights_read + self.token * (tokens - 1.0)

    def passes(self, depth: int) -> int:
        return min(1, depth) if self.parallel else depth

    def speedup(self, tokens: float, depth: int, nodes: float, batch: int = 1) -> float:
        """The speedup of a proposal with this many expected tokens. nodes: verified, root included."""
        return speedup(tokens, self.passes(depth) * self.draft, self.verify(nodes, batch), self.other)


@dataclass(frozen=True, slots=True)
class Shape:
    """A proposal with its expected tokens and speedup."""

    name: str
    depth: int
    nodes: int  # drafted: the root does not count
    tokens: float  # expected per decode step
    speedup: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """Acceptance and costs, with the proposals that they allow."""

    alpha_K: tuple[float, ...]  # acceptance by draft position; the last one counts for all later positions
    ranks: Ranks  # for trees
    costs: StepCosts
    lengths: Sequence[int] = field(default_factory=lambda: range(1, 11))  # chain lengths to consider

    def chain(self, K: int, batch: int = 1) -> Shape:
        prefix_K = self.alpha_K[:K]
        tokens = expected_tokens([*prefix_K, *[self.alpha_K[-1]] * (K - len(prefix_K))])
        return Shape("chain", K, K, tokens, self.costs.speedup(tokens, K, K + 1, batch))

    def tree(self, name: str, paths: Sequence[Path], batch: int = 1) -> Shape:
        depth, tokens = max(map(len, paths), default=0), tree_tokens(self.ranks, paths)
        return Shape(name, depth, len(paths), tokens, self.costs.speedup(tokens, depth, len(paths) + 1, batch))

    def best_chain(self, batch: int = 1) -> Shape:
        return max((self.chain(K, batch) for K in self.lengths), key=lambda shape: shape.speedup)

    def best_full_tree(self, width: int, nodes: int, batch: int = 1) -> Shape | None:
        """The fastest tree with `width` children at every node and at most `nodes` nodes; None if one level is too large."""
        depths = [d for d in range(1, len(self.ranks) + 1) if sum(width**k for k in range(1, d + 1)) <= nodes]
        shapes = [self.tree(f"{width}-ary tree", full_tree(width, d), batch) for d in depths]
        return max(shapes, key=lambda shape: shape.speedup, default=None)

    def static_trees(self, nodes: int, batch: int = 1) -> list[Shape]:
        """The static tree with the most expected tokens, for each number of nodes."""
        sizes = range(1, len(best_tree(self.ranks, nodes)) + 1)
        return [self.tree("static tree", best_tree(self.ranks, n), batch) for n in sizes]

    def at(self, alpha: float) -> Scenario:
        """The scenario with this acceptance at every position."""
        return replace(self, alpha_K=(alpha,))

    def break_even_draft_cost(self) -> float | None:
        """c_d above which no chain is faster than plain decoding at batch 1; None if free drafts are not faster either."""
        free = replace(self, costs=replace(self.costs, draft=0.0))
        spare = [
            (shape.tokens - self.costs.verify(K + 1) - self.costs.other) / self.costs.passes(K)
            for K, shape in ((K, free.chain(K)) for K in self.lengths)
        ]
        return max(spare) if max(spare) > 0 else None

    def break_even_alpha(self) -> float | None:
        """Acceptance (the same at every position) below which no chain is faster at batch 1; None if even 1 is too low."""
        if self.at(1.0).best_chain().speedup < 1.0:
            return None
        return _bisect(lambda alpha: self.at(alpha).best_chain().speedup >= 1.0, 0.0, 1.0)

    def break_even_batch(self) -> int | None:
        """The least batch size from which on no chain is faster than plain decoding; None: none up to `MOST_BATCH`."""
        if self.best_chain(MOST_BATCH).speedup >= 1.0:
            return None
        if self.costs.experts is not None:  # large batches read all experts anyway, so that a verification may get cheaper
            faster = (batch for batch in range(MOST_BATCH, 0, -1) if self.best_chain(batch).speedup >= 1.0)
            return next(faster, 0) + 1
        low, high = 0, MOST_BATCH  # in plain steps, a verification never gets cheaper with a larger batch
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.best_chain(middle).speedup >= 1.0 else (low, middle)
        return high


def _bisect(condition: Callable[[float], bool], low: float, high: float) -> float:
    """The least value for which a monotonic condition holds, to 1e-6."""
    if condition(low):
        return low
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if condition(middle) else (middle, high)
    return high


SIGMAS = 4.0  # mean and formula agree within this many standard errors
ROWS = 4096  # trials at a time
DRAFTED = 8  # tokens that the toy drafter samples from; as many further tokens have probability under the target only


@dataclass(frozen=True, slots=True)
class Trial:
    """Tokens of a decode step, by formula and simulated: our acceptance policies on drafts from toy distributions."""

    policy: str
    shape: str
    formula: float
    mean: float  # over the trials
    error: float  # standard error of the mean

    @property
    def agrees(self) -> bool:
        return abs(self.mean - self.formula) <= SIGMAS * self.error + 1e-9


def sampled_chain(alpha_K: Sequence[float], trials: int, seed: int) -> Trial:
    """A chain sampled from q under policy lossless. p is constructed so that sum min(p, q) = alpha_k at every position."""
    generator, K = torch.Generator().manual_seed(seed), len(alpha_K)
    q_V = torch.zeros(2 * DRAFTED)
    q_V[:DRAFTED] = torch.rand(DRAFTED, generator=generator) + 0.1
    q_V /= q_V.sum()
    residual_V = q_V.roll(DRAFTED)  # the tokens with q = 0
    alpha_K1 = torch.tensor([*alpha_K, alpha_K[-1]])[:, None]
    logits_NV = (alpha_K1 * q_V + (1.0 - alpha_K1) * residual_V).log()

    def propose(B: int) -> tuple[DraftTree, Tensor]:
        token_BK = torch.multinomial(q_V, B * K, replacement=True, generator=generator).view(B, K)
        token_BN = torch.cat([torch.zeros(B, 1, dtype=torch.long), token_BK], 1)
        return DraftTree.chain(token_BN, q_BNV=q_V.expand(B, K + 1, -1)), logits_NV.expand(B, -1, -1)

    return _trial("lossless", f"chain of {K}", expected_tokens(alpha_K), propose, trials, Sampling(1.0, seed=seed))


def tree_trial(policy: str, ranks: Ranks, paths: Sequence[Path], trials: int, seed: int) -> Trial:
    """A deterministic tree. A node's children are tokens 0, 1, ... by rank; each is true with its rank's probability."""
    generator, shape = torch.Generator().manual_seed(seed), TreeShape.of(paths)
    width, N = shape.max_rank + 1, len(shape.paths) + 1
    p_NV = torch.zeros(N, width + 1)
    for node, depth in enumerate(shape.depth_N.tolist()):
        row = list(ranks[min(depth, len(ranks) - 1)])[:width]
        p_NV[node, : len(row)] = torch.tensor(row)
    p_NV[:, width] = (1.0 - p_NV.sum(-1)).clamp_min(0.0)

    def propose(B: int) -> tuple[DraftTree, Tensor]:
        token_BN = shape.rank_N.expand(B, N).contiguous()
        tree = DraftTree.static(token_BN, shape)
        if policy != "greedy":
            return tree, p_NV.log().expand(B, N, -1)
        best_BN = torch.multinomial(p_NV, B, replacement=True, generator=generator).T
        return tree, torch.nn.functional.one_hot(best_BN, width + 1).float()

    sampling = Sampling(0.0 if policy == "greedy" else 1.0, seed=seed)
    return _trial(policy, f"tree of {N - 1}", tree_tokens(ranks, shape.paths), propose, trials, sampling)


def _trial(
    policy: str,
    shape: str,
    formula: float,
    propose: Callable[[int], tuple[DraftTree, Tensor]],
    trials: int,
    sampling: Sampling,
) -> Trial:
    """Run the policy on the trials. Every trial is a separate request with its own noise."""
    emitted: list[Tensor] = []
    with one_thread():
        for start in range(0, trials, ROWS):
            B = min(ROWS, trials - start)
            tree, logits_BNV = propose(B)
            position_BN = tree.ancestor_BNN.sum(-1)
            request = sampling.rows(torch.arange(start, start + B))
            accepted = POLICIES[policy].accept(tree, tree.ancestor_BNN, logits_BNV.contiguous(), position_BN, request)
            emitted.append(accepted.count_B.double())  # accepted drafts + 1: the root counts in place of the bonus token
    count_B = torch.cat(emitted)
    return Trial(policy, shape, formula, float(count_B.mean()), float(count_B.std() / len(count_B) ** 0.5))


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations this small take longer with several threads, which wait for each other busily."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
