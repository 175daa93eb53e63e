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
from drafttrain.drafters.common.dynamic_tree import Ids, Score, Scored, choices
from drafttrain.ops.build_tree import MOST_CANDIDATES, build_tree
from drafttrain.ops.top import top
from drafttrain.ops.tree_bits import MOST_NODES, ancestors_of


@dataclass(frozen=True, slots=True)
class Growth:
    """The paths that one depth may add."""

    above_P: Tensor  # the prefix's place among those kept a depth before
    choice_P: Tensor  # the last token's index in the choices of all depths, [depth * R]
    kept: int  # how many go on


@dataclass(frozen=True, slots=True)
class BestFirst:
    """The `nodes` likeliest paths, which JetSpec and D-Cut search for.

    The candidates are the root and the paths that are kept, depth by depth. X counts the root and the paths of all depths.
    """

    depths: list[Growth]  # from the first
    nodes: int
    ranks: int  # R
    start_M: Tensor  # where in X the paths of each candidate's depth begin
    parent_X: Tensor  # each path's parent among the candidates
    token_X: Tensor  # its last token's index among the root's and the choices of all depths, [1 + depth * R]

    @staticmethod
    def of(depth: int, nodes: int, vocab: int, device: torch.device) -> BestFirst:
        ranks, offset = min(nodes, vocab), 0  # offset: candidates before the depth above
        depths, starts, parents, tokens = list[Growth](), [0], [-1], [0]
        for depth_index, (pairs, kept_paths) in enumerate(_growths(depth, nodes, vocab)):
            above, choice = [i for i, _ in pairs], [depth_index * ranks + rank for _, rank in pairs]
            starts += [len(parents)] * kept_paths
            parents += [offset + i for i in above]
            tokens += [1 + choice_index for choice_index in choice]
            offset += depths[-1].kept if depths else 1
            above_P, choice_P = torch.tensor([above, choice], dtype=torch.long, device=device)
            depths.append(Growth(above_P, choice_P, kept_paths))
        columns = (torch.tensor(x, dtype=torch.long, device=device) for x in (starts, parents, tokens))
        return BestFirst(depths, nodes, ranks, *columns)

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
        return sum(kept_paths for _, kept_paths in _growths(depth, nodes, vocab))

    @staticmethod
    def fitting(depth: int, nodes: int, vocab: int) -> int:
        """`nodes`, or the most below it that the operators can hold."""
        sizes = range(min(nodes, MOST_NODES - 1), 0, -1)
        return next(n for n in sizes if 1 + BestFirst.most(depth, n, vocab) <= MOST_CANDIDATES)

    def grow(self, root_B: Tensor, first: Scored, score: Score, ids: Ids, depth: int | None) -> DraftTree:
        raise AssertionError("best-first search needs drafts that do not know each other")

    def from_slots(self, root_B: Tensor, logits_BKV: Tensor, ids: Tensor | None = None, depth: int | None = None) -> DraftTree:
        """As `Grower.from_slots`. Few operations run at each depth: what the kept paths are is looked up after the search."""
        depths = self.depths[: min(logits_BKV.shape[1], depth or len(self.depths))]
        gain_BKR, choice_BKR = choices(logits_BKV[:, : len(depths)], self.ranks, ids)
        gain_BX, score_BW = gain_BKR.flatten(1), torch.zeros_like(root_B, dtype=torch.float32)[:, None]
        scores, candidates = [score_BW], [torch.zeros_like(root_B)[:, None]]
        for growth in depths:
            gain_BP = gain_BX.index_select(1, growth.choice_P)
            score_BW, best_BW = top(score_BW.index_select(1, growth.above_P) + gain_BP, growth.kept)
            scores.append(score_BW)
            candidates.append(best_BW)
        candidate_BM = torch.cat(candidates, 1)
        candidate_BM = candidate_BM + self.start_M[: candidate_BM.shape[1]]
        count = 1 + min(self.nodes, candidate_BM.shape[1] - 1)
        built = build_tree(self.parent_X[candidate_BM], torch.cat(scores, 1), count)
        index_BN = self.token_X[candidate_BM.gather(1, built.kept_BN)]
        token_BN = torch.cat([root_B[:, None], choice_BKR.flatten(1)], 1).gather(1, index_BN)
        return DraftTree(token_BN, built.parent_BN, torch.full_like(root_B, count), known_BNN=ancestors_of(built.bits_BNw))


def _growths(depth: int, nodes: int, vocab: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """((place above, rank) pairs, how many of them can be nodes) of each depth that can have nodes at all."""
    previous_width = 1
    for level in range(1, min(depth, nodes) + 1):
        if level == 1:
            pairs = [(0, rank) for rank in range(min(nodes, vocab))]
        else:
            budget = nodes - level + 2
            parents = range(min(previous_width, budget // 2))
            pairs = [(i, rank) for i in parents for rank in range(min(vocab, budget // (i + 1) - 1))]
        previous_width = min(nodes - level + 1, len(pairs))
        yield pairs, previous_width
