"""Options of every block drafter, and the shape of block that they describe (arXiv 2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.core.errors import UserError
from drafttrain.drafters.options import BlockOptions
from drafttrain.model.shapes import LayerOptions, TargetShape

CONVENTIONS = {"in_place": 1, "shifted": 0}  # name -> the slot of the first draft


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
            spread_taps(target.blocks, options.TAPS) if options.target_layer_ids is None else tuple(options.target_layer_ids),
            target.vocab_size - 1 if options.mask_token is None else options.mask_token,
            options.slots,
            options.anchors,
            LayerOptions.of(options.layer),
        )

    def __post_init__(self) -> None:
        if not self.taps:
            raise UserError("drafter.target_layer_ids is []; name at least one block, or set it to null")

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
