"""The target states that a drafter trains on: computed in every step, or computed once and stored on disk."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.core.errors import UserError

FORMATS = ("float32", "bfloat16", "float8")
DISTRIBUTIONS = ("hidden", "top_k")


@dataclass
class FeatureOptions:
    """Where the target's states come from. All fields but `name` apply to `cached` (docs/scaling.md)."""

    name: str = (
        "online"  # online: the target runs in every step. cached: it runs once over all data, then states come from disk
    )
    dir: str | None = None  # null: <output>/features. Every set of features has its own folder there
    format: str = "bfloat16"  # of states: float32 | bfloat16 | float8 (e4m3, one scale a row)
    law: str = "hidden"  # the target's distribution: its post-norm state (hidden), or its k largest log-probabilities (top_k)
    k: int = 64  # of law=top_k: tokens stored per position
    verify: bool = True  # checks all shards' checksums before training; false: only their sizes
    confirm_above: float = 50.0  # GiB; writing more asks for confirmation
    yes: bool = False  # writes without asking

    def check(self, vocab_size: int) -> None:
        """Raise UserError for unknown values and for k outside the vocabulary."""
        for name, choices in (("name", ("online", "cached")), ("format", FORMATS), ("law", DISTRIBUTIONS)):
            if getattr(self, name) not in choices:
                raise UserError(f"features.{name} is {getattr(self, name)!r}; choose {', '.join(choices)}")
        if self.law == "top_k" and not 1 <= self.k < vocab_size:
            raise UserError(f"features.k is {self.k}, the target has {vocab_size} tokens; set it within 1..{vocab_size - 1}")
