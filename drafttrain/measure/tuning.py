"""Predicts the speed of every proposal that a drafter can make, from acceptance and measured step costs.

Shapes: M samples, K draft depth, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.tree import Path, tuned_paths
from drafttrain.decoding.tree_size import CANDIDATES, LARGE, proposal_seconds, verification_seconds
from drafttrain.measure.expected import expected_tau
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import Target
from drafttrain.objective.losses import Hits

OBJECTIVES = ("tpot", "throughput")
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class ProposalShape:
    """A proposal."""

    depth: int  # greatest depth; the drafter's proposal is cut there
    nodes: int  # drafted nodes: the root does not count
    paths: tuple[Path, ...] = ()  # the paths of a static tree, by rank; empty for chains
    grown: str | None = None  # kind of a tree that grows by confidence

    @property
    def settings(self) -> dict[str, Any]:
        """As `Drafter.use_decode_settings` takes them."""
        tree = {"paths": [list(path) for path in self.paths]} if self.paths else {}
        return {"draft_length": self.depth} | tree | ({"nodes": self.nodes} if self.grown else {})

    def __str__(self) -> str:
        kind = f"{self.grown.replace('_', '-')} tree" if self.grown else "tree" if self.paths else "draft length"
        return f"{kind} {self.depth}" if not self.paths else f"{kind}, depth {self.depth}, {self.nodes} nodes"


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predicted speed of a proposal."""

    shape: ProposalShape
    tau: float  # expected tokens per verification
    seconds: float  # of a decode step
    speedup: float  # over plain decoding


def surface(
    target: Target, drafter: Drafter, hits: Sequence[Hits], sampled: bool, batch: int, repeats: int = 15
) -> list[Predicted]:
    """Every proposal that the drafter can make, the fastest first. hits, sampled: as for `expected_tau`.

    The function measures the costs on this machine at this batch size: of drafting by depth, of a verification by nodes.
    """
    sequences, predicted = ranks_by_text(hits), partial(_predicted, target, drafter, hits, sampled, batch, repeats)
    found = predicted(shapes_of(drafter, sequences, target.trees))
    if found and found[0].shape.nodes == CANDIDATES[-1] and _searches(drafter, target.trees):
        found += predicted(shapes_of(drafter, sequences, target.trees, LARGE))
    return sorted(found, key=lambda p: -p.speedup)


def _predicted(
    target: Target,
    drafter: Drafter,
    hits: Sequence[Hits],
    sampled: bool,
    batch: int,
    repeats: int,
    shapes: Sequence[ProposalShape],
) -> list[Predicted]:
    """The speed of each of these shapes, the fastest first."""
    drafting = {depth: proposal_seconds(target, drafter, repeats, batch, depth) for depth in sorted({s.depth for s in shapes})}
    verifying = verification_seconds(target, drafter, sorted({s.nodes + 1 for s in shapes} | {1}), repeats, batch)
    found = []
    for shape in shapes:
        tau = expected_tau(hits, shape.paths or [path for path in drafter.proposal.paths if len(path) <= shape.depth], sampled)
        seconds = drafting[shape.depth] + verifying[shape.nodes + 1]
        if tau is not None:
            found.append(Predicted(shape, tau, seconds, tau * verifying[1] / seconds))
    return sorted(found, key=lambda p: -p.speedup)


def shapes_of(
    drafter: Drafter, sequences: Sequence[Tensor], trees: bool, sizes: Sequence[int] = CANDIDATES
) -> list[ProposalShape]:
    """The proposals to compare: depths; for drafters with a tunable tree, depths and node counts, each with its best paths."""
    depths = [d for d in DEPTHS if d < drafter.draft_length] + [drafter.draft_length]
    if not _searches(drafter, trees):
        own = drafter.proposal.paths
        return [ProposalShape(d, sum(len(path) <= d for path in own)) for d in depths]
    found = {}
    for depth in depths:
        cut = [rank_MK[:, :depth] for rank_MK in sequences]
        for nodes in sizes:
            paths = tuple(tuned_paths(cut, nodes))
            if paths:
                shape = ProposalShape(max(map(len, paths)), len(paths), paths, drafter.proposal.grown)
                found[shape.depth, shape.nodes] = shape
    return list(found.values())


def _searches(drafter: Drafter, trees: bool) -> bool:
    """Whether the drafter's tree can have any paths, for a target that verifies trees."""
    return drafter.proposal.takes_paths and trees


def temperatures(temperature: float) -> list[float]:
    """Draft temperatures to try, below, at and above the target's temperature."""
    return [round(temperature * share, 3) for share in (0.5, 0.7, 0.85, 1.0, 1.2)]


def ranks_by_text(hits: Sequence[Hits]) -> list[Tensor]:
    """Ranks [M, K] of each text that has samples."""
    return [text.to(torch.long) for h in hits for text in h.rank_MK.split(h.length_D) if len(text)]
