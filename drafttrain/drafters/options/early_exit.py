"""The options of early_exit."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import TreeOptions


@dataclass
class EarlyExitOptions(TreeOptions):
    """Where the exit is, and whether something is trained there."""

    family: str = "early_exit"
    tree: str = "chain"
    blocks: int | None = None  # of the target, from its first; null: a third of them
    adapter: bool = False  # one attention layer at the exit, the only thing trained
    draft_length: int = 4


OPTIONS = EarlyExitOptions
