"""Checks the formulas against our acceptance policies, with drafts from toy distributions.

Shapes: B trials, N nodes (root included), V vocabulary, K depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, Path, TreeShape
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.measure.simulate.formulas import Ranks, expected_tokens, tree_tokens

SIGMAS = 4.0  # mean and formula agree within this many standard errors
ROWS = 4096  # trials at a time
DRAFTED = 8  # tokens that the toy drafter samples from; as many further tokens have probability under the target only


@dataclass(frozen=True, slots=True)
class Trial:
    """Tokens of a decode step, by formula and simulated."""

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
