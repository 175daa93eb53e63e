"""The target's states that a drafter is trained on: computed in every step, or once and kept on disk."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.core.errors import UserError

FORMATS = ("float32", "bfloat16", "float8")
LAWS = ("hidden", "top_k")


@dataclass
class FeatureOptions:
    """Where the target's states come from; all but `name` is of `cached` (docs/scaling.md)."""

    name: str = "online"  # online: the target runs in every step. cached: once over all data, then from disk
    dir: str | None = None  # null: <output>/features. Every set of features has a folder of its own in it
    format: str = "bfloat16"  # of states: float32 | bfloat16 | float8 (e4m3, one scale a row)
    law: str = "hidden"  # the target's law as its post-norm state, or as its top_k log-probabilities
    k: int = 64  # of top_k
    verify: bool = True  # checksums of all shards before training; without it only their sizes
    confirm_above: float = 50.0  # GiB to write that need a yes
    yes: bool = False  # write them without being asked

    def check(self, vocab_size: int) -> None:
        """Raise UserError for values that there are not."""
        for name, choices in (("name", ("online", "cached")), ("format", FORMATS), ("law", LAWS)):
            if getattr(self, name) not in choices:
                raise UserError(f"features.{name} is {getattr(self, name)!r}; choose {', '.join(choices)}")
        if self.law == "top_k" and not 1 <= self.k < vocab_size:
            raise UserError(f"features.k is {self.k}, the target has {vocab_size} tokens; set it within 1..{vocab_size - 1}")
