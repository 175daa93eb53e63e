"""Low-rank matrices on the drafter, or on the target. No torch: composing a configuration reads this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.limits import above, at_least, choice


@dataclass
class LoraOptions:
    """Low-rank matrices that are trained in place of the drafter's own weights (LoRA, arXiv 2106.09685)."""

    rank: int = at_least(0, 0)  # 0: the weights themselves are trained
    alpha: float = above(16.0, 0)  # the matrices' product counts alpha / rank times
    targets: list[str] = field(default_factory=list)  # linear maps, by name; none: all but heads over a vocabulary


@dataclass
class LoraSpec:
    """How a family also trains the target: low-rank matrices added to its linear maps (arXiv 2106.09685).

    The defaults are those of self-distillation (arXiv 2401.10774, section 2.3.2).
    """

    rank: int = at_least(32, 0)  # 0: the target is not trained
    alpha: float = above(16.0, 0)  # the matrices' product counts alpha / rank times
    modules: list[str] = field(default_factory=list)  # last names of the blocks' linear maps, such as q_proj; none: all of them
    # keeps the target close. distil: KL(original || adapted); text: cross-entropy; of supervised tokens
    hold: str = choice("distil", "text")
    drafter_weight: float = above(0.01, 0)  # weight of the drafter's loss; that loss has weight 1
    ramp: bool = True  # drafter_weight grows from 0 as sin(pi / 2 * share of the steps)
    # share of the steps in which the drafter alone is trained, at the full drafter_weight
    start: float = at_least(0.0, 0, below=1)
    lr_scale: float = above(0.25, 0)  # the matrices' learning rate / train.lr

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
