"""Options of every block drafter, and the shape of block that they describe (arXiv 2602.06036)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from drafttrain.core.errors import UserError
from drafttrain.drafters.common.proposal import TreeOptions
from drafttrain.model.layers import LayerOptions
from drafttrain.model.target import TargetShape
from drafttrain.ops.tree_attention import MOST_NODES

CONVENTIONS = {"in_place": 1, "shifted": 0}  # name -> the slot of the first draft


@dataclass
class BlockOptions(TreeOptions):
    """The block, the weights of its slots in training, and the tree that is drafted."""

    tree: str = "chain"
    width: int = 4  # as wide as a block of 16 can be
    block_size: int = 16  # slots, the anchor's included
    slots: str = "in_place"  # in_place: slot k predicts the token k after the anchor. shifted: the one k + 1 after it
    layers: int = 5
    taps: list[int] | None = None  # block outputs, from 0; None: five, evenly from 1 to n - 3
    mask_token: int | None = None  # an id that the target embeds; None: the last one
    anchors: int = 512  # blocks of a sequence in one step at most
    weights: str = "decay"  # decay: exp(-k / gamma) for draft k from 0. dpace: by the drafter's own confidence
    gamma: float | None = None  # None: 7, 5, 4 for blocks of 16, of 10, and smaller
    alpha: float = 0.5  # of dpace: 1 is no doubt in any draft, near 0 the drafter's own confidence
    layer: LayerOptions = field(default_factory=LayerOptions)

    def decay(self, drafts: int) -> list[float]:
        """The weight of each draft, in all 1. Raises UserError for weights that there are not."""
        if self.weights not in ("decay", "dpace"):
            raise UserError(f"drafter.weights is {self.weights!r}; choose decay or dpace")
        gamma = default_gamma(self.block_size) if self.gamma is None else self.gamma
        if not (gamma > 0.0 and 0.0 < self.alpha <= 1.0):
            raise UserError(f"drafter.gamma is {gamma}, drafter.alpha {self.alpha}; set gamma above 0, alpha in (0, 1]")
        decay = [math.exp(-step / gamma) for step in range(drafts)]
        return [weight / sum(decay) for weight in decay]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The resolved block options. Raises UserError for a block that cannot be."""

    size: int  # slots of a block, the anchor's included
    layers: int
    taps: tuple[int, ...]
    mask_token: int
    slots: str = "in_place"  # which token a slot predicts
    anchors: int = 512  # blocks of a sequence in training at most
    layer: LayerOptions = field(default_factory=LayerOptions)

    @staticmethod
    def of(options: BlockOptions, target: TargetShape) -> BlockShape:
        return BlockShape(
            options.block_size,
            options.layers,
            spread_taps(target.blocks) if options.taps is None else tuple(options.taps),
            target.vocab_size - 1 if options.mask_token is None else options.mask_token,
            options.slots,
            options.anchors,
            LayerOptions.of(options.layer),
        )

    def __post_init__(self) -> None:
        if self.slots not in CONVENTIONS:
            raise UserError(f"drafter.slots is {self.slots!r}; choose {' or '.join(CONVENTIONS)}")
        if not 2 <= self.size <= MOST_NODES:
            raise UserError(f"drafter.block_size is {self.size}; choose 2..{MOST_NODES}")
        if self.layers < 1 or self.anchors < 1 or not self.taps:
            raise UserError(
                f"drafter.layers is {self.layers}, drafter.anchors {self.anchors}, drafter.taps {list(self.taps)}; "
                "each needs at least one"
            )

    @property
    def first(self) -> int:
        """The slot of the first draft."""
        return CONVENTIONS[self.slots]

    @property
    def drafts(self) -> int:
        return self.size - self.first


def spread_taps(blocks: int, count: int = 5) -> tuple[int, ...]:
    """The official choice: `count` blocks from the second to the third from the end, evenly; shallow targets give fewer.

    Of 36 blocks: 1, 9, 17, 25, 33.
    """
    first, last = min(1, blocks - 1), max(blocks - 3, 0)
    if count == 1 or last <= first:
        return (blocks // 2,)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


def default_gamma(size: int) -> float:
    """Of the official recipes, for blocks of 16, 10 and 8."""
    return 7.0 if size >= 16 else 5.0 if size >= 10 else 4.0
