"""The options of the training objective. No torch: composing a configuration reads this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drafttrain.core.errors import UserError
from drafttrain.core.limits import at_least, choice

DIVERGENCES = ("ce", "kl", "rkl", "jsd", "tvd", "lk")  # the rows of `ops.divergence.LOSSES`
END_TO_END, MIX = "e2e_tv", "mix"
MAX_LOGITS = 1 << 27  # logits of one model that are in memory at once: 1,024 predictions over 131,072 tokens


@dataclass
class LossOptions:
    """The divergence between the drafter's distribution q and the target's distribution p."""

    # ce: the token itself. kl: KL(p || q). rkl: KL(q || p). jsd, tvd. lk: -log sum min(p, q). e2e_tv, mix
    name: str = choice("kl", *DIVERGENCES, END_TO_END, MIX)
    # predictions whose logits are in memory at once; fewer where the target has more than 131,072 tokens
    chunk: int = at_least(1024, 1)
    mix: dict[str, float] = field(default_factory=dict)  # weight of each divergence by name; for name=mix only

    def check(self) -> None:
        """Raise UserError for weights that do not fit the loss."""
        mix_valid = all(name in DIVERGENCES and weight > 0 for name, weight in self.mix.items())
        if not mix_valid or (self.name == MIX) != bool(self.mix):
            raise UserError(
                f"loss.name is {self.name!r}, loss.mix {self.mix}; a mix, and nothing else, has weights above 0 of some of "
                f"{', '.join(DIVERGENCES)}"
            )

    @property
    def terms(self) -> Mapping[str, float]:
        """Divergences and their weights. The end-to-end loss is built from 1 - acceptance, the total variation."""
        return self.mix if self.name == MIX else {"tvd" if self.name == END_TO_END else self.name: 1.0}

    def at_once(self, vocab: int) -> int:
        """Predictions per chunk. The logits of a chunk never exceed `MAX_LOGITS`, however large the vocabulary is."""
        return max(1, min(self.chunk, MAX_LOGITS // vocab))
