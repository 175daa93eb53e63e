"""The proposals of families whose drafts can be a tree: a chain, a static tree, or one that grows by confidence or best first.

Shapes: B rows, K drafting slots, R ranks, P paths that one depth may add, W those kept, M candidates (root included),
X the root and the paths of all depths, N nodes, w words of 64 nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, Path, TreeShape, tuned_paths
from drafttrain.drafters.common.dynamic_tree import DynamicTree, Grower, Ids, Score, Scored, StaticTree, choices, confidence
from drafttrain.drafters.options import TreeOptions
from drafttrain.model.proposal import TEMPERATURES, Proposal, chain_paths
from drafttrain.model.target import Target
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
    """The `nodes` likeliest paths below drafts that do not know each other's tokens, found exactly on the device.

    JetSpec and D-Cut search for them. The candidates are the root and the paths that are kept, depth by depth.

    Every path of a depth has the same choices for its next token, so that a path's log-probability is a sum over depths of one
    term each. Best-first search (a heap of paths, the likeliest taken and its first child and next sibling put in) is serial;
    the same set comes out depth by depth, because a path is among the N likeliest only if few paths are certain to come before
    it:

        a path at depth d, of the prefix at place i (from 0) and of rank r, comes after
          the (i + 1) (r + 1) - 1 others of its depth with a place and a rank no higher,
          the i + 1 prefixes up to its own, and d - 2 shorter ones

    so that (i + 1) (r + 2) + d - 2 <= N. For 63 nodes that leaves 236 of 3,969 pairs at depth 2.
    """

    depths: list[Growth]  # from the first
    nodes: int
    ranks: int  # R
    start_M: Tensor  # where in X the paths of each candidate's depth begin
    parent_X: Tensor  # each path's parent among the candidates
    token_X: Tensor  # its last token's index among the root's and the choices of all depths, [1 + depth * R]
    temperature: float  # of the confidence, as in `DynamicTree`

    @staticmethod
    def of(depth: int, nodes: int, vocab: int, device: torch.device, temperature: float = 1.0) -> BestFirst:
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
        start_M, parent_X, token_X = (torch.tensor(x, dtype=torch.long, device=device) for x in (starts, parents, tokens))
        return BestFirst(depths, nodes, ranks, start_M, parent_X, token_X, temperature)

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

    def grow(self, root_B: Tensor, first: Scored, score: Score, ids: Ids, sampling: Sampling, depth: int | None) -> DraftTree:
        raise AssertionError("best-first search needs drafts that do not know each other")

    def from_slots(
        self, root_B: Tensor, logits_BKV: Tensor, ids: Tensor | None, sampling: Sampling, depth: int | None = None
    ) -> DraftTree:
        """As `Grower.from_slots`. Few operations run at each depth: what the kept paths are is looked up after the search."""
        depths = self.depths[: min(logits_BKV.shape[1], depth or len(self.depths))]
        confidence_BKV = confidence(logits_BKV[:, : len(depths)], self.temperature, sampling)
        gain_BKR, choice_BKR = choices(confidence_BKV, self.ranks, ids)
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


NODES = 24  # of a tree that grows by confidence and was neither given a number nor tuned


class TreeProposal(Proposal):
    """The proposal that `TreeOptions` describe.

    A static tree without paths is searched by `tune`. A tree that grows by confidence gets the node budget of `tune` if its
    options give none; its `paths` are those of the best static tree of its size, from which expected tau is estimated. For a
    target that is exact for chains only it is a chain.
    """

    def __init__(self, options: TreeOptions, draft_length: int, target: Target, independent: bool = False) -> None:
        """independent: drafts do not know each other's tokens. Raises UserError for a shape that cannot be."""
        tree_kind, paths = options.tree, options.paths
        if not 1 <= draft_length < MOST_NODES:
            raise UserError(f"drafter.draft_length is {draft_length}; set it within 1 and {MOST_NODES - 1}")
        if paths is not None and tree_kind != "static":
            raise UserError(
                f"drafter.paths is set and drafter.tree is {tree_kind}; set drafter.tree=static, or leave paths out"
            )
        if tree_kind == "best_first" and not independent:
            raise UserError(
                "drafter.tree is best_first, and this family's drafts depend on those above them: set drafter.tree=dynamic"
            )
        super().__init__(draft_length)
        self.kind, self.given = tree_kind, paths
        if self.grown and not target.trees:
            self.kind = "chain"
        if paths is not None:
            self._paths = self._checked(paths)
        self.width, self.vocab, self._nodes_given = options.width, target.shape.vocab_size, options.nodes is not None
        self.nodes = NODES if options.nodes is None else options.nodes
        self.confidence_temperature = 1.0
        if self.grown:
            self._check_size()
            second = [(1,)] if self.max_nodes > 1 + draft_length else []
            self._paths = [*chain_paths(draft_length), *second]  # of some tree, until `tune` has seen text

    @property
    def grown(self) -> str | None:
        """The kind, where each tree's shape follows the drafter's confidence; only its node count is chosen."""
        return self.kind if self.kind in ("dynamic", "best_first") else None

    @property
    def takes_paths(self) -> bool:
        return self.tunable

    @property
    def tunable(self) -> bool:
        return self.grown is not None or (self.kind == "static" and self.given is None)

    def _checked(self, paths: Sequence[Sequence[int]]) -> list[Path]:
        try:
            shape = TreeShape.of(paths)
        except ValueError as error:
            raise UserError(f"drafter.paths: {error}") from error
        if not 1 <= shape.max_depth <= self.draft_length or len(paths) >= MOST_NODES:
            raise UserError(
                f"drafter.paths has {len(paths)} nodes down to depth {shape.max_depth}; 1 to {MOST_NODES - 1} nodes and "
                f"{self.draft_length} levels, the draft length, are allowed"
            )
        return list(shape.paths)

    def _check_size(self) -> None:
        try:
            if self.kind == "dynamic":
                self._dynamic.check()
            else:
                BestFirst.check(self.draft_length, self.nodes, self.vocab)
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def _dynamic(self) -> DynamicTree:
        return DynamicTree(self.draft_length, self.width, self.nodes, self.confidence_temperature)

    def grower(self, device: torch.device) -> Grower:
        """The object that builds the trees; a chain is the static tree of one path."""
        if self.kind == "best_first":
            return BestFirst.of(self.draft_length, self.nodes, self.vocab, device, self.confidence_temperature)
        return self._dynamic.grower(device) if self.kind == "dynamic" else StaticTree.of(self.paths, device)

    @property
    def scratch_positions(self) -> int:
        """Nodes that one proposal passes through the drafter at most: scratch positions of its cache."""
        if self.grown:
            return self.width * (self.draft_length - 1) if self.kind == "dynamic" else 0
        return len(self.paths)

    @property
    def max_nodes(self) -> int:
        if self.kind == "dynamic":
            return 1 + min(self.nodes, self._dynamic.candidates(self.draft_length))
        if self.kind == "best_first":
            return 1 + min(self.nodes, BestFirst.most(self.draft_length, self.nodes, self.vocab))
        return 1 + len(self.paths)

    def tune(self, sequences: Sequence[Tensor], nodes: int) -> None:
        if not self.tunable:
            return
        if self.grown and not self._nodes_given:
            best_first = self.kind == "best_first"
            self._resize(BestFirst.fitting(self.draft_length, nodes, self.vocab) if best_first else nodes)
        budget = self.nodes if self.grown else min(nodes, MOST_NODES - 1)
        self._paths = self._checked(tuned_paths(sequences, budget) or [(0,)])

    def fit_confidence(self, loss_T: Tensor) -> None:
        if self.grown:
            self.confidence_temperature = TEMPERATURES[int(loss_T.argmin())]

    def _resize(self, nodes: int) -> None:
        self.nodes = nodes
        self._check_size()

    def tree_settings(self, depth: int, paths: Sequence[Path]) -> dict[str, Any]:
        return super().tree_settings(depth, paths) | self._growth(len(paths))

    def settings(self) -> dict[str, Any]:
        return {} if self.kind == "chain" else {"paths": [list(p) for p in self.paths]} | self._growth(self.nodes)

    def _growth(self, nodes: int) -> dict[str, Any]:
        """The settings of a tree that grows; none for another."""
        return {"nodes": nodes, "confidence_temperature": self.confidence_temperature} if self.grown else {}

    def use(self, settings: Mapping[str, Any]) -> None:
        super().use(settings)
        if self.kind != "chain" and "paths" in settings:
            self._paths = self._checked(settings["paths"])
        if self.grown and "nodes" in settings:
            self._resize(settings["nodes"])
        self.confidence_temperature = settings.get("confidence_temperature", 1.0)
