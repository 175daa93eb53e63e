"""The proposals of families whose drafts can be a tree: a chain, a static tree, or a tree that grows by confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.tree import Path, TreeShape, tuned_paths
from drafttrain.drafters.common.best_first import BestFirst
from drafttrain.drafters.common.dynamic_tree import DynamicTree, Grower, StaticTree
from drafttrain.drafters.options import TreeOptions
from drafttrain.model.proposal import Proposal, chain_paths
from drafttrain.model.target import Target
from drafttrain.ops.tree_bits import MOST_NODES

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
        return DynamicTree(self.draft_length, self.width, self.nodes)

    def grower(self, device: torch.device) -> Grower:
        """The object that builds the trees; a chain is the static tree of one path."""
        if self.kind == "best_first":
            return BestFirst.of(self.draft_length, self.nodes, self.vocab, device)
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

    def _resize(self, nodes: int) -> None:
        self.nodes = nodes
        self._check_size()

    def settings(self) -> dict[str, Any]:
        if self.kind == "chain":
            return {}
        tree_settings: dict[str, Any] = {"paths": [list(p) for p in self.paths]}
        return tree_settings | ({"nodes": self.nodes} if self.grown else {})

    def use(self, settings: Mapping[str, Any]) -> None:
        super().use(settings)
        if self.kind != "chain" and "paths" in settings:
            self._paths = self._checked(settings["paths"])
        if self.grown and "nodes" in settings:
            self._resize(settings["nodes"])
