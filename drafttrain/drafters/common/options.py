"""Options that several families share. No torch: composing a configuration reads this."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from drafttrain.core.errors import UserError
from drafttrain.model.shapes import LayerOptions


@dataclass
class TreeOptions:
    """Options of every family whose drafts can be a tree. docs/families/eagle.md explains how trees grow."""

    tree: str = "static"  # chain | static | dynamic | best_first, where drafts do not know each other
    paths: list[list[int]] | None = None  # of a static tree, by rank; None: searched on held-out text after training
    width: int = 10  # dynamic: paths fed at each depth, and candidates of each
    nodes: int | None = None  # dynamic, best_first: of the proposal, root excluded; None: decode.tree_nodes


@dataclass
class BlockOptions(TreeOptions):
    """The block, the weights of its slots in training, and the tree that is drafted."""

    TAPS: ClassVar[int] = 5  # how many `taps=None` are, in a target that is deep enough

    tree: str = "chain"
    width: int = 4  # as wide as a block of 16 can be
    block_size: int = 16  # slots, the anchor's included
    slots: str = "in_place"  # in_place: slot k predicts the token k after the anchor. shifted: the one k + 1 after it
    layers: int = 5
    taps: list[int] | None = None  # block outputs, from 0; None: five, evenly from 1 to n - 3
    mask_token: int | None = None  # an id that the target embeds; None: the last one
    anchors: int = 512  # blocks of a sequence in one step at most
    causal: bool = False  # slots see no later slot of their block, in all layers
    weights: str = "decay"  # decay: exp(-k / gamma) for draft k from 0. dpace: by the drafter's own confidence. uniform
    gamma: float | None = None  # None: 7, 5, 4 for blocks of 16, of 10, and smaller
    alpha: float = 0.5  # of dpace: 1 is no doubt in any draft, near 0 the drafter's own confidence
    causal_windows: bool = True  # in layers with a sliding window slots see no later slot of their block, as in vLLM and SGLang
    confidence: str | None = None  # top1: of chains, the probability of a draft's likeliest token, as in D-Cut
    layer: LayerOptions = field(default_factory=LayerOptions)

    def confident(self) -> bool:
        """Whether chains carry a confidence. Raises UserError for one that there is not."""
        if self.confidence not in (None, "top1"):
            raise UserError(f"drafter.confidence is {self.confidence!r}; choose top1, or null for none")
        if self.confidence and self.tree != "chain":
            raise UserError(f"drafter.confidence is {self.confidence} and drafter.tree {self.tree}; set drafter.tree=chain")
        return self.confidence is not None

    def decay(self, drafts: int) -> list[float]:
        """The weight of each draft, in all 1. Raises UserError for weights that there are not."""
        if self.weights not in ("decay", "dpace", "uniform"):
            raise UserError(f"drafter.weights is {self.weights!r}; choose decay, dpace or uniform")
        gamma = default_gamma(self.block_size) if self.gamma is None else self.gamma
        if not (gamma > 0.0 and 0.0 < self.alpha <= 1.0):
            raise UserError(f"drafter.gamma is {gamma}, drafter.alpha {self.alpha}; set gamma above 0, alpha in (0, 1]")
        decay = [1.0 if self.weights == "uniform" else math.exp(-step / gamma) for step in range(drafts)]
        return [weight / sum(decay) for weight in decay]


def default_gamma(size: int) -> float:
    """Of the official recipes, for blocks of 16, 10 and 8."""
    return 7.0 if size >= 16 else 5.0 if size >= 10 else 4.0
