"""The shape of a drafter's proposals: which tree it drafts, and how that tree is chosen.

Shapes: M samples, K draft depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafttrain.core.tree import Path

TEMPERATURES = (1.0, 0.5, 0.25, 0.125)  # of a tree's confidence: powers of two, by which logits of any format divide exactly


@dataclass(frozen=True, slots=True)
class Preferred:
    """Decode settings that tuning found best. The user's settings override them; None: nothing was found."""

    draft_length: int | None = None
    draft_temperature: float | None = None
    temperature: float | None = None  # the sampling temperature that `draft_temperature` was found for

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Preferred:
        return Preferred(*(settings.get(name) for name in ("draft_length", "draft_temperature", "temperature")))


class Proposal:
    """A chain of `draft_length` drafts, or a fixed tree. Subclasses describe trees that can be chosen.

    `settings` is saved with a checkpoint and read back by `use`.
    """

    def __init__(self, draft_length: int, paths: Sequence[Path] | None = None) -> None:
        """paths: of a fixed tree, by rank; None: a chain."""
        self._draft_length = draft_length
        self._paths = chain_paths(draft_length) if paths is None else list(paths)
        self.preferred = Preferred()

    @property
    def draft_length(self) -> int:
        """K: the depth of the deepest proposal."""
        return self._draft_length

    @property
    def predicted_depths(self) -> int:
        """The first so many depths are predicted by `Drafter.predict` and counted in the training figures."""
        return self.draft_length

    @property
    def paths(self) -> list[Path]:
        """The rank paths that greedy decoding proposes."""
        return list(self._paths)

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree, root included."""
        return len(self.paths) + 1

    @property
    def grown(self) -> str | None:
        """How confidence decides the shape of each tree ("dynamic", "best_first"); None: it does not."""
        return None

    @property
    def grows(self) -> bool:
        """Whether confidence decides any of it, so that `fit_confidence` has an effect."""
        return self.grown is not None

    def fit_confidence(self, loss_T: Tensor) -> None:
        """Choose the temperature at which the drafter's confidence is nearest to P(the token is the target's likeliest).

        loss_T: the cross-entropy of the target's likeliest tokens at each of `TEMPERATURES`, on text that the drafter was not
        trained on.
        """

    @property
    def takes_paths(self) -> bool:
        """Whether `use` accepts the rank paths of any tree."""
        return False

    @property
    def more_nodes(self) -> int:
        """Nodes of the largest tree that are not among `paths`."""
        return 0

    def tree_settings(self, depth: int, paths: Sequence[Path]) -> dict[str, Any]:
        """What `use` takes for a tree of these rank paths, `depth` deep."""
        return {"draft_length": depth, "paths": [list(path) for path in paths]}

    @property
    def tunable(self) -> bool:
        """Whether `tune` chooses anything."""
        return False

    def tune(self, sequences: Sequence[Tensor], nodes: int) -> None:
        """Choose the tree on held-out text.

        sequences: the teacher-forced ranks of each sequence's tokens, [M, K], in order. nodes: budget, root excluded.
        """

    def settings(self) -> dict[str, Any]:
        """The settings to save: JSON values only."""
        return {}

    def use(self, settings: Mapping[str, Any]) -> None:
        """Take the saved settings, and what tuning preferred. Raises UserError for a tree that cannot be drafted."""
        self.preferred = Preferred.of(settings)


def chain_paths(draft_length: int) -> list[Path]:
    """(0), (0, 0), ...: the rank paths of a chain."""
    return [(0,) * depth for depth in range(1, draft_length + 1)]
