"""Formulas for the expected tokens of a decode step and the speedup.

alpha: P(a draft is accepted | the earlier drafts are accepted). E: expected tokens of a step, including the bonus token. Steps
are independent, as Leviathan et al. assume (arXiv 2211.17192).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from drafttrain.core.tree import Path

Ranks = Sequence[Sequence[float]]  # [depth][rank]: P(the drafter's choice of this rank is true | the path above is true)


def expected_tokens(alpha_K: Sequence[float]) -> float:
    """E of a chain: 1 + the sum of P(the first k are accepted).

    With one alpha it is (1 - alpha^(K+1)) / (1 - alpha), their equation 1.
    """
    return 1.0 + sum(accumulate(alpha_K, mul))


def speedup(tokens: float, draft: float, verify: float, other: float = 0.0) -> float:
    """E / cost of a step in plain steps. With draft = K c, verify = 1 and other = 0 it is their theorem 3.8."""
    return tokens / (draft + verify + other)


def distinct_experts(tokens: float, experts: int, chosen: int) -> float:
    """The expected number of distinct experts of a layer that `tokens` tokens read, each choosing `chosen` of `experts`.

    E (1 - (1 - k / E)^m), for tokens that choose independently. Texts choose alike, so that real numbers are lower.
    """
    return experts * (1.0 - (1.0 - chosen / experts) ** tokens)


def operations(tokens: float, K: int, draft_operations: float) -> float:
    """Arithmetic per token of a chain, as a multiple of plain decoding's (their theorem 3.11).

    draft_operations: arithmetic of a draft token / of a target token.
    """
    return (K * draft_operations + K + 1) / tokens


def geometric_ranks(alpha: float, width: int, depth: int) -> list[list[float]]:
    """Ranks where each choice, given that those before are wrong, is true with alpha: alpha, (1 - alpha) alpha, ..."""
    return [[alpha * (1.0 - alpha) ** r for r in range(width)]] * depth


def path_probability(ranks: Ranks, path: Path) -> float:
    """P(a node's whole path is true); 0 beyond the table."""
    probability = 1.0
    for depth, rank in enumerate(path):
        probability *= ranks[depth][rank] if depth < len(ranks) and rank < len(ranks[depth]) else 0.0
    return probability


def tree_tokens(ranks: Ranks, paths: Sequence[Path]) -> float:
    """E of a tree: 1 + the sum over its nodes of P(the node's whole path is true)."""
    return 1.0 + sum(path_probability(ranks, path) for path in paths)


def full_tree(width: int, depth: int) -> list[Path]:
    """Every path of `width` children at each of `depth` levels: width + width^2 + ... nodes."""
    levels: list[list[Path]] = [[()]]
    for _ in range(depth):
        levels.append([(*path, rank) for path in levels[-1] for rank in range(width)])
    return [path for level in levels[1:] for path in level]


def best_tree(ranks: Ranks, nodes: int) -> list[Path]:
    """The static tree with the most expected tokens: the most probable paths, with their prefixes, breadth first."""
    frontier: list[tuple[float, Path]] = [(-share, (rank,)) for rank, share in enumerate(ranks[0])] if ranks else []
    heapq.heapify(frontier)
    selected_paths: list[Path] = []
    while frontier and len(selected_paths) < nodes:
        share, path = heapq.heappop(frontier)
        if share == 0.0:
            break
        selected_paths.append(path)
        child_ranks = ranks[len(path)] if len(path) < len(ranks) else ()
        for rank, child_share in enumerate(child_ranks):
            heapq.heappush(frontier, (share * child_share, (*path, rank)))
    return sorted(selected_paths, key=lambda path: (len(path), path))


def shifted(alpha_K: Sequence[float], change: float) -> list[float]:
    """Each acceptance changed by `change`, within 0 and 1."""
    return [min(1.0, max(0.0, alpha + change)) for alpha in alpha_K]
