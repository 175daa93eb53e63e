"""The likeliest paths below drafts that do not know each other's tokens, found exactly on the device.

Shapes: B rows, R ranks, P paths that one depth may add, W those kept, M candidates (root included), N nodes.

Every path of a depth has the same choices for its next token, so that a path's log-probability is a sum over depths of one
term each. Best-first search (a heap of paths, the likeliest taken and its first child and next sibling put in) is serial;
the same set comes out depth by depth, because a path is among the N likeliest only if few paths are certain to come before it:

    a path at depth d, of the prefix at place i (from 0) and of rank r, comes after
      the (i + 1) (r + 1) - 1 others of its depth with a place and a rank no higher,
      the i + 1 prefixes up to its own, and d - 2 shorter ones

so that (i + 1) (r + 2) + d - 2 <= N. For 63 nodes that leaves 236 of 3,969 pairs at depth 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.core.tree import DraftTree
from drafttrain.drafters.common.dynamic_tree import Generation, Score, Scored, choices
from drafttrain.ops.build_tree import MOST_CANDIDATES, build_tree
from drafttrain.ops.top import top
from drafttrain.ops.tree_bits import MOST_NODES, ancestors_of


@dataclass(frozen=True, slots=True)
class Growth:
    """The paths that one depth may add."""

    above_P: Tensor  # the prefix's place among those kept a depth before
    rank_P: Tensor
    kept: int  # how many go on


@dataclass(frozen=True, slots=True)
class BestFirst:
    """The `nodes` likeliest paths, as JetSpec and D-Cut search them. depths: from the first."""

    depths: list[Growth]
    nodes: int

    @staticmethod
    def of(depth: int, nodes: int, vocab: int, device: torch.device) -> BestFirst:
        depths = []
        for pairs, kept in _growths(depth, nodes, vocab):
            above_P, rank_P = torch.tensor(pairs, dtype=torch.long, device=device).unbind(1)
            depths.append(Growth(above_P, rank_P, kept))
        return BestFirst(depths, nodes)

    @staticmethod
    def check(depth: int, nodes: int, vocab: int) -> None:
        """Raise ValueError for a tree that the operators cannot hold."""
        if nodes < 1 or depth < 1:
            raise ValueError(f"a best-first tree of depth {depth} and {nodes} nodes: both must be 1 or more")
        candidates = 1 + BestFirst.most(depth, nodes, vocab)
        if nodes >= MOST_NODES or candidates > MOST_CANDIDATES:
            raise ValueError(
                f"a best-first tree of depth {depth} and {nodes} nodes has {candidates} candidates; at most {MOST_NODES - 1} "
                f"nodes and {MOST_CANDIDATES} candidates are possible: lower drafter.nodes or the draft length"
            )

    @staticmethod
    def most(depth: int, nodes: int, vocab: int) -> int:
        """Paths among which the nodes are chosen."""
        return sum(kept for _, kept in _growths(depth, nodes, vocab))

    @staticmethod
    def fitting(depth: int, nodes: int, vocab: int) -> int:
        """`nodes`, or the most below it that the operators can hold."""
        sizes = range(min(nodes, MOST_NODES - 1), 0, -1)
        return next(n for n in sizes if 1 + BestFirst.most(depth, n, vocab) <= MOST_CANDIDATES)

    def grow(self, root_B: Tensor, first: Scored, score: Score, ids: Tensor | None, depth: int | None) -> DraftTree:
        """As `Grower.grow`; each depth scores one node, since all nodes of it have the same logits."""
        depths = self.depths[: depth or len(self.depths)]
        node_BW = torch.zeros_like(root_B)[:, None]
        score_BW = torch.zeros_like(node_BW, dtype=torch.float32)
        tokens, scores, parents, held, scored = [root_B[:, None]], [score_BW], [node_BW - 1], 1, first
        for number, growth in enumerate(depths):
            if number:
                scored = score(Generation(tokens[-1][:, :1], first.state_BWH, number, None))
            assert scored.logits_BWV.shape[1] == 1, "best-first search needs drafts that do not know each other"
            ranks = min(self.nodes, scored.logits_BWV.shape[-1])
            gain_BR, choice_BR = (x[:, 0] for x in choices(scored.logits_BWV, ranks, ids))
            score_BW, best_BW = top(score_BW[:, growth.above_P] + gain_BR[:, growth.rank_P], growth.kept)
            tokens.append(choice_BR.gather(1, growth.rank_P[best_BW]))
            scores.append(score_BW)
            parents.append(node_BW.gather(1, growth.above_P[best_BW]))
            node_BW = (held + torch.arange(growth.kept, device=root_B.device)).expand(len(root_B), -1)
            held += growth.kept
        count = 1 + min(self.nodes, held - 1)
        built = build_tree(torch.cat(parents, 1), torch.cat(scores, 1), count)
        token_BN, count_B = torch.cat(tokens, 1).gather(1, built.kept_BN), torch.full_like(root_B, count)
        return DraftTree(token_BN, built.parent_BN, count_B, known_BNN=ancestors_of(built.bits_BNw))


def _growths(depth: int, nodes: int, vocab: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """((place above, rank) pairs, how many of them can be nodes) of each depth that can have nodes at all."""
    above = 1
    for number in range(1, min(depth, nodes) + 1):
        if number == 1:
            pairs = [(0, rank) for rank in range(min(nodes, vocab))]
        else:
            budget = nodes - number + 2
            places = range(min(above, budget // 2))
            pairs = [(i, rank) for i in places for rank in range(min(vocab, budget // (i + 1) - 1))]
        above = min(nodes - number + 1, len(pairs))
        yield pairs, above
