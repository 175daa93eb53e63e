"""The training objective: divergences between drafter and target, and the scores of each prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drafttrain.core.errors import UserError
from drafttrain.core.limits import at_least

END_TO_END, MIX = "e2e_tv", "mix"
MAX_LOGITS = 1 << 27  # logits of one model that are in memory at once: 1,024 predictions over 131,072 tokens


@dataclass
class LossOptions:
    """The divergence between the drafter's distribution q and the target's distribution p."""

    # ce: the token itself. kl: KL(p || q). rkl: KL(q || p). jsd, tvd. lk: -log sum min(p, q). lk_hybrid: both. e2e_tv, mix
    name: str = "kl"
    # predictions whose logits are in memory at once; fewer where the target has more than 131,072 tokens
    chunk: int = at_least(1024, 1)
    mix: dict[str, float] = field(default_factory=dict)  # weight of each divergence by name; for name=mix only
    # share of the target's positions that are left out at the start, those of the greatest entropy; it falls to 0 at the end
    entropy_drop: float = at_least(0.0, 0, below=1)

    def check(self) -> None:
        """Raise UserError for an unknown loss, or weights that do not fit the loss."""
        from drafttrain.ops.divergence import LOSSES  # imports torch, which composing a configuration does not need

        names = (*LOSSES, END_TO_END, MIX)
        if self.name not in names:
            raise UserError(f"loss.name is {self.name!r}; choose one of {', '.join(names)}")
        if self.name == END_TO_END and self.entropy_drop:
            raise UserError(f"loss.entropy_drop is {self.entropy_drop:g}; {END_TO_END} weighs whole drafts: set it to 0")
        mix_valid = all(name in LOSSES and weight > 0 for name, weight in self.mix.items())
        if not mix_valid or (self.name == MIX) != bool(self.mix):
            raise UserError(
                f"loss.name is {self.name!r}, loss.mix {self.mix}; a mix, and nothing else, has weights above 0 of some of "
                f"{', '.join(LOSSES)}"
            )

    @property
    def terms(self) -> Mapping[str, float]:
        """Divergences and their weights. The end-to-end loss is built from 1 - acceptance, the total variation."""
        return self.mix if self.name == MIX else {"tvd" if self.name == END_TO_END else self.name: 1.0}

    def at_once(self, vocab: int) -> int:
        """Predictions per chunk. The logits of a chunk never exceed `MAX_LOGITS`, however large the vocabulary is."""
        return max(1, min(self.chunk, MAX_LOGITS // vocab))
