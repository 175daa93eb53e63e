"""Floor 1: what shape a drafter's proposals have: a chain, one static tree, or a dynamic tree; how it is chosen and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter import Drafter
from drafttrain.dynamic import DynamicTree, StaticTree
from drafttrain.errors import UserError
from drafttrain.ops.tree_attention import MOST_NODES
from drafttrain.target import Target
from drafttrain.tree import Path, TreeShape, tuned_paths

KINDS = ("chain", "static", "dynamic")
NODES = 24  # of a dynamic tree that was neither given a number nor tuned


@dataclass
class TreeOptions:
    """What every family is asked whose drafts can be a tree: how trees grow is told in docs/families/eagle.md."""

    tree: str = "static"  # chain | static | dynamic
    paths: list[list[int]] | None = None  # of a static tree, by rank; None: searched on held-out text after training
    width: int = 10  # dynamic: paths fed at each depth, and candidates of each
    nodes: int | None = None  # dynamic: of the proposal, root excluded; None: decode.tree_nodes


class Proposal:
    """draft_length: the greatest depth. A static tree without paths is searched, a dynamic one without a node count gets the
    budget that `tune` brings. Raises UserError for a shape that cannot be.
    """

    def __init__(self, options: TreeOptions, draft_length: int, target: Target) -> None:
        kind, paths, nodes = options.tree, options.paths, options.nodes
        if kind not in KINDS:
            raise UserError(f"drafter.tree is {kind!r}; choose one of {', '.join(KINDS)}")
        if not 1 <= draft_length < MOST_NODES:
            raise UserError(f"drafter.draft_length is {draft_length}; set it within 1 and {MOST_NODES - 1}")
        if paths is not None and kind != "static":
            raise UserError(f"drafter.paths is set and drafter.tree is {kind}; set drafter.tree=static, or leave paths out")
        if kind == "dynamic" and not target.trees:
            raise UserError(
                "drafter.tree is dynamic; this target's architecture is exact for chains only: set drafter.tree=chain"
            )
        self.kind, self.draft_length, self.given = kind, draft_length, paths
        chain: list[Path] = [(0,) * d for d in range(1, draft_length + 1)]
        self.paths = self._checked(paths) if paths is not None else chain
        self.dynamic, self._sized = DynamicTree(draft_length, options.width, nodes or NODES), nodes is not None
        if kind == "dynamic":
            self._check_dynamic()
            self.paths = [*chain, (1,)] if options.width > 1 else chain  # of some tree, until `tune` has seen text

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

    def _check_dynamic(self) -> None:
        try:
            self.dynamic.check()
        except ValueError as error:
            raise UserError(str(error)) from error

    def grower(self, device: torch.device) -> StaticTree | DynamicTree:
        """What grows the proposals; a chain is the static tree of one path."""
        return self.dynamic if self.kind == "dynamic" else StaticTree.of(self.paths, device)

    @property
    def fed(self) -> int:
        """Nodes that one proposal feeds through the drafter at most: scratch positions of its cache."""
        if self.kind == "dynamic":
            return self.dynamic.width * (self.draft_length - 1)
        return len(self.paths)

    @property
    def max_nodes(self) -> int:
        """Of the target's verification, root included."""
        if self.kind == "dynamic":
            return 1 + min(self.dynamic.nodes, self.dynamic.candidates(self.draft_length))
        return 1 + len(self.paths)

    @property
    def tunable(self) -> bool:
        return self.kind == "dynamic" or (self.kind == "static" and self.given is None)

    def tune(self, texts: Sequence[Tensor], nodes: int) -> None:
        """As `Drafter.tune`. A dynamic tree's paths are those of the best static tree of its size: an estimate, from which
        expected tau is computed."""
        if not self.tunable:
            return
        if self.kind == "dynamic" and not self._sized:
            self._resize(nodes)
        budget = self.dynamic.nodes if self.kind == "dynamic" else min(nodes, MOST_NODES - 1)
        self.paths = self._checked(tuned_paths(texts, budget) or [(0,)])

    def _resize(self, nodes: int) -> None:
        self.dynamic = DynamicTree(self.draft_length, self.dynamic.width, nodes)
        self._check_dynamic()

    def settings(self) -> dict[str, Any]:
        """As `Drafter.decode_settings`."""
        if self.kind == "chain":
            return {}
        kept: dict[str, Any] = {"paths": [list(p) for p in self.paths]}
        return kept | ({"nodes": self.dynamic.nodes} if self.kind == "dynamic" else {})

    def use(self, settings: dict[str, Any]) -> None:
        if self.kind != "chain" and "paths" in settings:
            self.paths = self._checked(settings["paths"])
        if self.kind == "dynamic" and "nodes" in settings:
            self._resize(settings["nodes"])


class Proposing(Drafter):
    """A drafter whose drafts have the shape of `proposal`."""

    proposal: Proposal

    def paths(self) -> list[Path]:
        return list(self.proposal.paths)

    @property
    def max_nodes(self) -> int:
        return self.proposal.max_nodes

    @property
    def tunable(self) -> bool:
        return self.proposal.tunable

    def tune(self, texts: Sequence[Tensor], nodes: int) -> None:
        self.proposal.tune(texts, nodes)

    def decode_settings(self) -> dict[str, Any]:
        return self.proposal.settings()

    def use_decode_settings(self, settings: dict[str, Any]) -> None:
        self.proposal.use(settings)
