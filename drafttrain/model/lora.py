"""Low-rank matrices on the drafter, or on the target. No torch: composing a configuration reads this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from drafttrain.core.errors import UserError


@dataclass
class LoraOptions:
    """Low-rank matrices that are trained in place of the drafter's own weights (LoRA, arXiv 2106.09685)."""

    rank: int = 0  # 0: the weights themselves are trained
    alpha: float = 16.0  # the matrices' product counts alpha / rank times
    targets: list[str] = field(default_factory=list)  # linear maps, by name; none: all but heads over a vocabulary

    def check(self) -> None:
        """Raise UserError for values outside their range."""
        if self.rank < 0 or self.alpha <= 0:
            raise UserError(
                f"train.lora.rank is {self.rank}, alpha {self.alpha:g}; set rank to 1 or more (0: no LoRA) and alpha above 0"
            )


@dataclass
class LoraSpec:
    """How a family also trains the target: low-rank matrices added to its linear maps (arXiv 2106.09685).

    The defaults are those of self-distillation (arXiv 2401.10774, section 2.3.2).
    """

    rank: int = 32  # 0: the target is not trained
    alpha: float = 16.0  # the matrices' product counts alpha / rank times
    modules: list[str] = field(default_factory=list)  # last names of the blocks' linear maps, such as q_proj; none: all of them
    hold: str = "distil"  # keeps the target close. distil: KL(original || adapted); text: cross-entropy; of supervised tokens
    drafter_weight: float = 0.01  # weight of the drafter's loss; that loss has weight 1
    ramp: bool = True  # drafter_weight grows from 0 as sin(pi / 2 * share of the steps)
    start: float = 0.0  # share of the steps in which the drafter alone is trained, at the full drafter_weight
    lr_scale: float = 0.25  # the matrices' learning rate / train.lr

    @staticmethod
    def of(given: LoraSpec | Mapping[str, Any]) -> LoraSpec | None:
        """From a LoraSpec or a checkpoint's plain data; None for rank 0. Raises UserError for an unknown setting."""
        if isinstance(given, LoraSpec):
            return given if given.rank else None
        valid_names = [f.name for f in fields(LoraSpec)]
        unknown = sorted(given.keys() - set(valid_names))
        if unknown:
            raise UserError(f"drafter.adapter has no setting {', '.join(unknown)}; it has {', '.join(valid_names)}")
        return LoraSpec.of(LoraSpec(**given))

    def check(self) -> None:
        """Raise UserError for values outside their range."""
        if self.rank < 1 or self.alpha <= 0:
            raise UserError(
                f"drafter.adapter.rank is {self.rank}, alpha {self.alpha:g}; set both above 0, or rank to 0 for no adapter"
            )
        if self.hold not in ("distil", "text"):
            raise UserError(f"drafter.adapter.hold is {self.hold!r}; choose distil or text")
        if not 0.0 <= self.start < 1.0:
            raise UserError(f"drafter.adapter.start is {self.start:g}; set it to 0 or more and below 1, a share of the steps")
        for name in ("drafter_weight", "lr_scale"):
            if getattr(self, name) <= 0:
                raise UserError(f"drafter.adapter.{name} is {getattr(self, name):g}; set it above 0")
