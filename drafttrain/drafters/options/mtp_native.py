"""The options of mtp_native."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import TreeOptions


@dataclass
class MTPNativeOptions(TreeOptions):
    """Where the module comes from, and how deep it is trained on its own outputs."""

    family: str = "mtp_native"
    tree: str = "chain"  # as serving stacks draft with such modules
    source: str = "target"  # target: the target's own checkpoint. fresh: random. Else the directory of another checkpoint
    steps: int = 3  # of training on own outputs
    step_decay: float = 0.6  # step i (from 0) weighs step_decay ** i; the weights add up to 1 (arXiv 2509.18362)
    draft_length: int = 3
    modules: int | None = None  # more than 1: one for each depth; null: as many as the files have, of fresh ones 1
    norm_output: bool | None = None  # the normed state goes to the next depth; null: as the target's layout says


OPTIONS = MTPNativeOptions
